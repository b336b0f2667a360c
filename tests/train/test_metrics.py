"""Metric writers: exact values, no duplicates or gaps after a crash, errors with the path."""

import json
import math
import os
import pathlib
import resource
import signal
import struct
import subprocess
import sys
import time

import numpy as np
import pytest

from axcore.config import AxcoreError
from axcore.train import JsonlWriter, TensorBoardWriter
from axcore.train.callbacks.writers import read_jsonl


def opened(cfg, folder):
    """A writer with the folder that `start` would set."""
    writer = cfg.build()
    writer.folder = folder
    return writer


@pytest.fixture
def writer(tmp_path):
    built = opened(JsonlWriter.Config(), tmp_path)
    yield built
    built.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def steps(path):
    return [record["step"] for record in read_jsonl(path)]


def test_floats_come_back_bit_for_bit(writer, path):
    values = np.random.default_rng(0).integers(0, 1 << 63, 500).view(np.float64)
    values = [float(value) for value in values if math.isfinite(value)] + [0.1 + 0.2, -0.0, 5e-324, 1e22]
    writer.write(1, {f"v{i}": value for i, value in enumerate(values)})
    (record,) = read_jsonl(path)
    assert [struct.pack("d", record[f"v{i}"]) for i in range(len(values))] == [struct.pack("d", v) for v in values]


def test_each_line_is_standard_json_with_step_and_time(writer, path):
    values = {
        "loss": np.float32(0.1),
        "tokens": 1 << 60,
        "a": math.nan,
        "b": math.inf,
        "c": -math.inf,
        "é": 1.5,
    }
    before = time.time()
    writer.write(3, values)

    def refuse(name):
        raise ValueError(name)

    line = json.loads(path.read_text(), parse_constant=refuse)  # NaN and Infinity are not JSON
    assert line.pop("step") == 3 and before <= line.pop("time") <= time.time()
    assert line.pop("loss") == float(np.float32(0.1))
    assert line == {"tokens": 1 << 60, "a": "NaN", "b": "Infinity", "c": "-Infinity", "é": 1.5}
    (record,) = read_jsonl(path)
    assert math.isnan(record["a"]) and record["b"] == math.inf and record["c"] == -math.inf


def test_a_metric_cannot_be_named_step(writer):
    with pytest.raises(AxcoreError, match="cannot be named"):
        writer.write(1, {"step": 2.0})


def test_rewind_drops_later_lines_and_a_torn_line(writer, path):
    for step in range(1, 8):
        writer.write(step, {"loss": step / 3})
    writer.close()
    with path.open("ab") as file:
        file.write(b'{"step": 8, "time": 1.0, "lo')
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]
    resumed = opened(JsonlWriter.Config(), path.parent)
    resumed.rewind(5)
    for step in (6, 7):
        resumed.write(step, {"loss": step / 3})
    resumed.close()
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]
    assert [record["loss"] for record in read_jsonl(path)] == [step / 3 for step in range(1, 8)]
    assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]


def test_rewind_without_later_lines_changes_nothing(writer, path):
    writer.rewind(3)
    assert not path.exists()
    writer.write(1, {"loss": 1.0})
    inode = path.stat().st_ino
    writer.rewind(1)
    assert path.stat().st_ino == inode and steps(path) == [1]


@pytest.mark.parametrize("length", [3, 5000])
def test_appending_to_a_torn_line_drops_it(path, length):
    whole = '{"step": 1, "time": 1.0}\n'
    path.write_text(whole + '{"step": 2, "t' + "x" * length)
    writer = opened(JsonlWriter.Config(), path.parent)
    writer.write(3, {})
    writer.close()
    assert path.read_text().startswith(whole + '{"step": 3,')
    assert steps(path) == [1, 3]


def test_a_broken_line_before_the_last_raises(path):
    path.write_text('{"step": 1}\noops\n{"step": 2}\n')
    with pytest.raises(AxcoreError, match="line 2"):
        read_jsonl(path)


SIGKILLED = """
import pathlib, sys
from axcore.train.callbacks.writers import JsonlWriter
writer = JsonlWriter.Config().build()
writer.folder = pathlib.Path(sys.argv[1])
step = 0
while True:
    step += 1
    writer.write(step, {"loss": 1 / step})
    if step % 1000 == 0:
        print(step, flush=True)
"""


def test_a_killed_process_loses_no_line(path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SIGKILLED, str(path.parent)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as child:
        told = [int(child.stdout.readline()) for _ in range(3)][-1]
        child.send_signal(signal.SIGKILL)
    written = steps(path)
    assert written == list(range(1, len(written) + 1)) and len(written) >= told


@pytest.mark.parametrize("kind", [JsonlWriter, TensorBoardWriter])
def test_a_full_disk_names_the_path_and_leaves_whole_lines(tmp_path, kind):
    now = {"flush_seconds": 0} if kind is TensorBoardWriter else {}
    writer = opened(kind.Config(**now), tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(AxcoreError, match=rf"cannot write .* to {tmp_path}/\S+: File too large"):
            for step in range(1, 10_000):
                writer.write(step, {"a metric with quite a long name": 1 / 3})
        with pytest.raises(AxcoreError):
            writer.write(step, {"loss": 1.0, "x" * 200: 2.0})
            writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if kind is JsonlWriter:
        assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")
        assert steps(tmp_path / "metrics.jsonl") == list(range(1, step))
        writer.close()


@pytest.mark.parametrize("kind", [JsonlWriter, TensorBoardWriter])
def test_unwritable_folder_names_the_path(kind):
    writer = opened(kind.Config(), pathlib.Path("/proc/run"))
    with pytest.raises(AxcoreError, match=r"cannot write .* to /proc/run/\S+: No such file"):
        writer.write(1, {"loss": 1.0})


def test_files_may_be_in_subfolders(tmp_path):
    for config in (JsonlWriter.Config(file="sub/m.jsonl"), TensorBoardWriter.Config(folder="sub/events")):
        writer = opened(config, tmp_path)
        writer.rewind(0)
        writer.write(1, {"loss": 1.0})
        writer.flush()
        writer.close()
    assert steps(tmp_path / "sub/m.jsonl") == [1]


def read_events(folder):
    """(step, {tag: value}) or (step, "purge") of each event, in order. Reads the documented record format."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found = []
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack_from("<Q", content)
            event = Event.FromString(content[12 : 12 + length])
            content = content[12 + length + 4 :]
            if event.session_log.status == SessionLog.START:
                found.append((event.step, "purge"))
            elif event.summary.value:
                found.append((event.step, {value.tag: value.simple_value for value in event.summary.value}))
    return found


def test_tensorboard_scalars_and_purge_on_resume(tmp_path):
    first = opened(TensorBoardWriter.Config(), tmp_path)
    first.rewind(0)
    for step in (1, 2, 3):
        first.write(step, {"loss": step / 2, "rate": 0.25})
    first.close()
    resumed = opened(TensorBoardWriter.Config(), tmp_path)
    resumed.rewind(2)
    resumed.write(3, {"loss": 7.0})
    resumed.flush()
    expected = [(step, {"loss": step / 2, "rate": 0.25}) for step in (1, 2, 3)]
    assert read_events(tmp_path / "tensorboard") == [*expected, (3, "purge"), (3, {"loss": 7.0})]
    resumed.close()


def test_tensorboard_flushes_after_flush_seconds(tmp_path):
    writer = opened(TensorBoardWriter.Config(flush_seconds=0.0), tmp_path)
    writer.write(1, {"loss": 1.0})
    assert read_events(tmp_path / "tensorboard") == [(1, {"loss": 1.0})]
    writer.close()
