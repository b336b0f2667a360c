"""Contract 8: the input in constant memory, and each document once per epoch on any number of processes."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from axcore.train.data import JsonLines, TextInput

TRAIN = """
import resource, sys
from pathlib import Path
import numpy as np
from axcore_tiny.recipes import tiny
from axcore.train.data import TextFiles

folder, limit_mb, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

def memory_mb():  # what RLIMIT_DATA counts
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) // 1024

def fit(name, steps):
    cfg = tiny()
    source = TextFiles.Config(folder=str(folder / name), validation_percent=25.0)
    cfg = cfg.set(steps=steps, input=cfg.input.set(source=source, batch_size=64, seq_len=64, prefetch_batches=2))
    return cfg.build().run(folder / f"run-{name}")

fit("small", 2)  # compiles the same program, starts the same threads
before = memory_mb()
resource.setrlimit(resource.RLIMIT_DATA, ((before + limit_mb) * 2**20,) * 2)
try:
    np.ones(2 * limit_mb * 2**17)  # the limit is real
except MemoryError:
    pass
else:
    raise SystemExit("the limit does not hold")
summary = fit("large", steps)
print(f"ok {summary['steps']} {memory_mb() - before}")
"""


def write_corpus(folder, megabytes, files=40):
    """Files without a line in common: numbers in random order."""
    folder.mkdir()
    rng = np.random.default_rng(len(str(folder)))
    for number in range(files):
        block = "\n".join(map(str, rng.integers(10**9, size=2000))).encode()
        with (folder / f"{number:03}.txt").open("wb") as file:
            for copy in range(max(1, int(megabytes * 2**20 / files / len(block)))):
                file.write(b"%d\n" % copy + block + b"\n")


def train_under_a_limit(tmp_path, limit_mb, steps):
    write_corpus(tmp_path / "small", 0.2)
    write_corpus(tmp_path / "large", 10 * limit_mb)
    size = sum(path.stat().st_size for path in (tmp_path / "large").iterdir())
    assert size > 9.5 * limit_mb * 2**20
    tiny = os.path.join(os.path.dirname(__file__), "..", "tiny_plugin")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([tiny, *sys.path]), "MALLOC_ARENA_MAX": "2"}
    run = [sys.executable, "-c", TRAIN, str(tmp_path), str(limit_mb), str(steps)]
    done = subprocess.run(run, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] and done.stdout.splitlines()[-1].startswith(f"ok {steps} "), done.stderr[
        -3000:
    ]


@pytest.mark.long
def test_a_corpus_ten_times_the_memory_trains(tmp_path):
    train_under_a_limit(tmp_path, limit_mb=64, steps=3)


@pytest.mark.slow
def test_an_epoch_of_a_corpus_ten_times_the_memory_trains(tmp_path):
    """Every piece is read and trained on once."""
    limit_mb = 32
    train_under_a_limit(tmp_path, limit_mb=limit_mb, steps=int(0.75 * 10 * limit_mb * 2**20 / (64 * 64)))


def test_one_two_and_four_processes_read_each_document_once_per_epoch(tmp_path):
    lines = [json.dumps({"text": f"{number:07}"}) for number in range(2100)]  # with its separator, a row of 8 tokens
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    source = JsonLines.Config(file=str(tmp_path / "lines.jsonl"), validation_percent=20.0)
    cfg = TextInput.Config(source=source, seq_len=8, batch_size=8, seed=4, piece_bytes=8)
    documents = source.build().documents("train", 8)
    contents = sorted(int(documents[i].content) for i in range(len(documents)))
    assert 1500 < len(contents) < 1800

    def read(process_count, steps, state):
        inputs = [cfg.build(process_index=i, process_count=process_count) for i in range(process_count)]
        shards = [each.train_batches() for each in inputs]
        for shard in shards if state else ():
            shard.set_state(state)
        rows = [
            int(bytes(row[:7].tolist())) for _ in range(steps) for shard in shards for row in next(shard)["targets"]
        ]
        state = {number: stream for shard in shards for number, stream in shard.get_state().items()}
        return rows, json.loads(json.dumps(state))

    steps = 5 * len(contents) // 8
    whole, _ = read(1, steps, None)
    first, state = read(1, 200, None)
    second, state = read(2, 300, state)
    third, state = read(4, steps - 500, state)
    assert first + second + third == whole  # in order, bit for bit
    # Rows are shuffled in windows, so the ends of epochs are blurred by a window for each stream.
    counts = np.unique(whole, return_counts=True)
    assert counts[0].tolist() == contents
    assert set(counts[1].tolist()) <= {4, 5, 6}
    assert (counts[1] == 5).mean() > 0.9
