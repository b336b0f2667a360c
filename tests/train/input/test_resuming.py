"""The state and the identity of an input."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from axcore.config import AxcoreError, to_json
from axcore.train.data import ByteTokenizer, FirstFit, Split, check_identity

from .reading import joined, same, take


class Doubling(ByteTokenizer):
    """Two tokens for each byte."""

    class Config(ByteTokenizer.Config):
        pass

    def encode(self, content):
        return np.repeat(super().encode(content), 2)


@pytest.mark.parametrize("packing", [None, FirstFit.Config(open_rows=3)], ids=["concat-then-split", "first-fit"])
@pytest.mark.parametrize("window", [0, 4 * 16 * 5])
def test_state_does_not_count_what_was_read_ahead(cfg, packing, window, monkeypatch):
    monkeypatch.setattr("axcore.train.data.streams._WINDOW_TOKENS", window)
    monkeypatch.setattr("axcore.train.data.rows._PACKED_TOGETHER", 48)  # three rows
    cfg = cfg.set(batch_size=4) if packing is None else cfg.set(batch_size=4, packing=packing)
    inp = cfg.build()
    expected = take(inp.train_batches(), 60)
    for stop in (0, 1, 4, 5, 6, 17, 50):
        batches = inp.train_batches()
        assert same(take(batches, stop), expected[:stop])
        state = json.loads(json.dumps(batches.get_state()))
        assert same(take(batches, 3), expected[stop : stop + 3])  # asking for the state disturbs nothing
        fresh = cfg.set(prefetch_batches=stop % 4).build().train_batches()
        next(fresh)
        fresh.set_state(state)
        again = fresh.get_state()
        assert same(take(fresh, 10), expected[stop : stop + 10])
        fresh.set_state(again)  # back again
        assert same(take(fresh, 2), expected[stop : stop + 2])


@pytest.mark.parametrize("packing", [None, FirstFit.Config(open_rows=3)], ids=["concat-then-split", "first-fit"])
def test_state_fits_another_number_of_processes(cfg, packing):
    cfg = cfg if packing is None else cfg.set(packing=packing)
    expected = take(cfg.build().train_batches(), 40)
    state = {}
    for count, start in ((1, 0), (2, 7), (4, 18), (3, 25), (1, 33)):
        parts = [cfg.build(process_index=i, process_count=count).train_batches() for i in range(count)]
        for part in parts if state else ():
            part.set_state(state)
        steps = {0: 7, 7: 11, 18: 7, 25: 8, 33: 7}[start]
        assert same(joined([take(part, steps) for part in parts]), expected[start : start + steps])
        state = json.loads(json.dumps({k: v for part in parts for k, v in part.get_state().items()}))
        assert sorted(map(int, state)) == list(range(12))


def test_resuming_in_a_new_process_is_exact(cfg, tmp_path):
    code = """
import itertools, json, sys
from axcore.config import from_json
from axcore.train.data import TextInput
job = json.load(open(sys.argv[1]))
inp = from_json(job["cfg"]).build(process_index=1, process_count=2)
batches = inp.train_batches()
batches.set_state(job["state"])
rows = [{name: a.tolist() for name, a in b.items()} for b in itertools.islice(batches, 4)]
print(json.dumps([rows, inp.identity()]))
"""
    inp = cfg.build(process_index=1, process_count=2)
    batches = inp.train_batches()
    take(batches, 9)
    (tmp_path / "job").write_text(json.dumps({"cfg": to_json(cfg), "state": batches.get_state()}))
    env = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = [sys.executable, "-c", code, str(tmp_path / "job")]
    done = subprocess.run(run, env=env, capture_output=True, text=True, check=True)
    rows, identity = json.loads(done.stdout)
    assert rows == [{name: a.tolist() for name, a in batch.items()} for batch in take(batches, 4)]
    assert done.stderr == ""  # the iterator was not closed, and nothing is said at exit
    check_identity(identity, inp.identity())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 4}, "seed was 3, is 4"),
        ({"batch_size": 24}, "batch_size was 12, is 24, streams was 12, is 24"),
        ({"seq_len": 8}, "seq_len was 16, is 8"),
        ({"shuffle": False}, "shuffle was True, is False"),
        ({"streams": 4}, "streams was 12, is 4"),
        ({"packing": FirstFit.Config()}, "packing was .*ConcatThenSplit.* is .*FirstFit"),
        ({"tokenizer": Doubling.Config()}, "tokenizer was '[0-9a-f]+', is '[0-9a-f]+'"),
    ],
)
def test_another_input_has_another_identity(cfg, options, message):
    identity = json.loads(json.dumps(cfg.build(process_index=1, process_count=2).identity()))
    check_identity(identity, cfg.set(prefetch_batches=0).build().identity())
    with pytest.raises(AxcoreError, match=rf"differs from that of the checkpoint \({message}"):
        check_identity(identity, cfg.set(**options).build().identity())


@pytest.mark.parametrize("split", Split)
def test_another_text_has_another_identity(cfg, files, split, tmp_path):
    shutil.copytree(cfg.source.folder, tmp_path / "copy")
    source = cfg.source.set(folder=str(tmp_path / "copy"))
    cfg = cfg.set(source=source)
    identity = cfg.build().identity()
    name = next(
        n for n in files if source.build().is_validation(n) == (split is Split.VALIDATION) and len(files[n]) > 9
    )
    (tmp_path / "copy" / name).write_bytes(files[name][::-1])
    word = {Split.TRAIN: ".*training_text", Split.VALIDATION: "validation_text"}[split]
    with pytest.raises(AxcoreError, match=rf"checkpoint \({word} was '[0-9a-f]+', is '[0-9a-f]+'\)"):
        check_identity(identity, cfg.build().identity())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("3"), "must have a position for stream 3, got None"),
        (lambda state: state.update({"3": 7}), "must have a position for stream 3, got 7"),
        (lambda state: state["3"].update(batches=-1), "must have a position for stream 3"),
        (lambda state: state["3"].update(batches=2), r"same number of batches, got \[1, 2\]"),
        (lambda state: state["3"].update(position={}), "does not fit its streams: KeyError"),
    ],
)
def test_a_state_of_another_form(cfg, change, message):
    batches = cfg.build().train_batches()
    next(batches)
    state = batches.get_state()
    change(state)
    with pytest.raises(AxcoreError, match=message):
        batches.set_state(state)


def test_close_may_be_called_twice(cfg):
    batches = cfg.build().train_batches()
    next(batches)
    batches.close()
    batches.close()
    with pytest.raises(ValueError, match="closed"):
        take(batches, 100)
    cfg.build().train_batches().close()
