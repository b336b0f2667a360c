"""Contract 8: the input in constant memory, and each document once per epoch on any number of processes."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from axcore.train.data import JsonLines, TextFiles, TextInput

TRAIN = """
import resource, sys, threading
from pathlib import Path
import numpy as np
from axcore_tiny.recipes import tiny
from axcore.train.data import TextFiles

threading.stack_size(2**20)  # 8 MB of stack for each thread would be most of the limit
folder, limit_mb, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

def memory_mb():  # what RLIMIT_DATA counts
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) // 1024

def fit(name, steps):
    cfg = tiny()
    source = TextFiles.Config(folder=str(folder / name), validation_percent=25.0)
    cfg = cfg.set(steps=steps, input=cfg.input.set(source=source, batch_size=16, seq_len=64, prefetch_batches=2))
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
print(f"ok {summary['steps']} ")
"""

READ = """
import itertools, resource, sys
from axcore.train.data import TextFiles, TextInput

folder, limit_mb, seq_len, steps = sys.argv[1], *map(int, sys.argv[2:])

def read(name, batches):
    source = TextFiles.Config(folder=f"{folder}/{name}", validation_percent=25.0)
    inp = TextInput.Config(source=source, seq_len=seq_len, batch_size=16).build()
    train = inp.train_batches()
    count = sum(batch["inputs"].size for batch in itertools.islice(train, batches))
    train.close()
    return count + sum(1 for _ in inp.validation_batches()) + len(inp.identity())

read("small", 600)
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + limit_mb * 2**20,) * 2)
print("ok", read("large", steps))
"""


def write_corpus(folder, megabytes, files=40):
    """A corpus of random numbers. Its validation split is small, because the trainer reads all of it."""
    folder.mkdir()
    source = TextFiles.Config(folder=str(folder), validation_percent=25.0).build()
    rng = np.random.default_rng(len(str(folder)))
    for number in range(files):
        block = "\n".join(map(str, rng.integers(10**9, size=2000))).encode()
        with (folder / f"{number:03}.txt").open("wb") as file:
            size = 0 if source.is_validation(f"{number:03}.txt") else megabytes * 2**20 * 1.4 / files
            for copy in range(max(1, int(size / len(block)))):
                file.write(b"%d\n" % copy + block + b"\n")


def run_under_a_limit(code, tmp_path, limit_mb, *more):
    write_corpus(tmp_path / "small", 0.2)
    write_corpus(tmp_path / "large", 10 * limit_mb)
    size = sum(path.stat().st_size for path in (tmp_path / "large").iterdir())
    assert size > 9.5 * limit_mb * 2**20
    tiny = os.path.join(os.path.dirname(__file__), "..", "tiny_plugin")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([tiny, *sys.path]), "MALLOC_ARENA_MAX": "2"}
    run = [sys.executable, "-c", code, str(tmp_path), str(limit_mb), *more]
    done = subprocess.run(run, env=env, capture_output=True, text=True, check=False)
    assert "ok " in done.stdout, done.stderr[-3000:]


@pytest.mark.slow
def test_a_corpus_of_ten_times_the_memory_limit_is_read(tmp_path):
    run_under_a_limit(READ, tmp_path, 24, "64", "3000")


@pytest.mark.long
def test_a_corpus_of_ten_times_the_memory_limit_trains(tmp_path):
    run_under_a_limit(TRAIN, tmp_path, 128, "3")


@pytest.mark.slow
def test_an_epoch_of_ten_times_the_memory_limit_is_read(tmp_path):
    run_under_a_limit(READ, tmp_path, 128, "1024", str(1280 * 2**20 // (16 * 1024)))


def test_one_two_and_four_processes_read_each_document_once_per_epoch(tmp_path):
    lines = [json.dumps({"text": f"{number:07}"}) for number in range(840)]  # with its separator, a row of 8 tokens
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    source = JsonLines.Config(file=str(tmp_path / "lines.jsonl"), validation_percent=20.0)
    cfg = TextInput.Config(source=source, seq_len=8, batch_size=8, seed=4, piece_bytes=8)
    documents = source.build().documents("train", 8)
    contents = sorted(int(documents[i].content) for i in range(len(documents)))
    assert 550 < len(contents) < 750

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
    first, state = read(1, 90, None)
    second, state = read(2, 120, state)
    third, state = read(4, steps - 210, state)
    assert first + second + third == whole  # in order, bit for bit
    # Rows are shuffled within windows, so consecutive epochs overlap by one window per stream.
    counts = np.unique(whole, return_counts=True)
    assert counts[0].tolist() == contents
    assert set(counts[1].tolist()) <= {4, 5, 6}
    assert (counts[1] == 5).mean() > 0.9
