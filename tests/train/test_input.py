"""The text input against a plain-Python reading of the same files."""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys

import grain
import numpy as np
import pytest

from axcore.config import AxcoreError, ConfigError, to_json
from axcore.train.data import (
    ByteTokenizer,
    Document,
    FirstFit,
    Mixture,
    Source,
    Split,
    TextFiles,
    TextInput,
    batch_spec,
    check_identity,
)
from axcore.train.data.order import ShuffledDocuments
from axcore.train.data.streams import derived_seed

SEP = 256
GOLDEN = [[18, 8, 26, 17], [16, 3, 6, 0], [24, 2, 21, 5], [27, 1, 14, 22], [25, 12, 10, 23]]
GOLDEN_DOCUMENTS = [5461264980, 8975911350, 4755496197, 4597197433, 4898944078]


class Doubling(ByteTokenizer):
    """Two tokens for each byte."""

    class Config(ByteTokenizer.Config):
        pass

    def encode(self, content):
        return np.repeat(super().encode(content), 2)


# ---- the reference: plain Python, written from the documentation alone


def plain_stream(contents):
    return [token for content in contents for token in (SEP, *content)]


def plain_row(stream, window, seq_len):
    """What window `window` must hold, token by token."""
    row = {name: [] for name in batch_spec(1, 1)}
    segment, position = 1, 0
    for place in range(window * seq_len, (window + 1) * seq_len):
        if place + 1 >= len(stream):  # nothing follows: padding
            for values in row.values():
                values.append(0)
            continue
        if stream[place] == SEP and place > window * seq_len:
            segment, position = segment + 1, 0
        row["inputs"].append(stream[place])
        row["targets"].append(stream[place + 1])
        row["weights"].append(1.0)
        row["segment_ids"].append(segment)
        row["positions"].append(position)
        position += 1
    return row


def stack(rows):
    return {name: [row[name] for row in rows] for name in rows[0]}


def assert_batch(batch, expected):
    assert {name: array.tolist() for name, array in batch.items()} == expected


# ---- a corpus on disk


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """name -> content of 40 files with sizes from 1 byte to several windows."""
    rng = random.Random(7)
    return {
        f"{i % 4}/{i:02}.txt": rng.randbytes(rng.choice((1, 5, 40, 130))).replace(b"\0", b"x") or b"x"
        for i in range(40)
    }


@pytest.fixture(scope="module")
def cfg(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    source = TextFiles.Config(folder=str(folder), validation_percent=30.0)
    return TextInput.Config(source=source, seq_len=16, batch_size=12, seed=3, prefetch_batches=5)


def halves(cfg, files):
    """Contents of (training, validation) files in the order that is promised; a later copy does not count."""
    source = cfg.source.build()
    unique = {}
    for name in sorted(files):
        unique.setdefault(files[name], name)
    train = [content for content, name in unique.items() if not source.is_validation(name)]
    return train, [content for content, name in unique.items() if source.is_validation(name)]


def take(batches, count):
    return list(itertools.islice(batches, count))


def same(batches, others):
    return len(batches) == len(others) and all(
        np.array_equal(a[name], b[name]) for a, b in zip(batches, others, strict=True) for name in a
    )


def row_keys(batches):
    """One hashable value for each row."""
    return [row.tobytes() for batch in batches for row in np.concatenate([batch["inputs"], batch["targets"]], 1)]


def joined(shards):
    """Global batches from those of each process."""
    return [
        {name: np.concatenate([shard[name] for shard in together]) for name in together[0]}
        for together in zip(*shards, strict=True)
    ]


def texts(batches):
    """The whole texts in rows that are read one after the other, each as `(input, target)` pairs; those cut by the
    beginning and the end are left out."""
    found, text = [], []
    for batch in batches:
        for inputs, targets, weights in zip(batch["inputs"], batch["targets"], batch["weights"], strict=True):
            for token, target, weight in zip(inputs.tolist(), targets.tolist(), weights.tolist(), strict=True):
                if not weight:
                    continue
                if token == SEP:
                    text = []
                text.append((token, target))
                if target == SEP and text[0][0] == SEP:
                    found.append(tuple(text))
    return found


def pairs(content):
    """What the model learns of a document: from the separator before it to the one after it."""
    tokens = [SEP, *content, SEP]
    return tuple(itertools.pairwise(tokens))


# ---- training


def one_stream(cfg):
    """Rows in the order of the documents."""
    return cfg.set(batch_size=1, streams=1, piece_bytes=2**20)


@pytest.mark.parametrize("packing", [None, FirstFit.Config(open_rows=3)], ids=["concat-then-split", "first-fit"])
def test_without_shuffling_the_documents_can_be_read_off(cfg, files, packing):
    cfg = one_stream(cfg).set(shuffle=False)
    train, _ = halves(cfg, files)
    if packing is None:
        batches = take(cfg.build().train_batches(), sum(len(content) + 1 for content in train) // 16)
        assert texts(batches)[: len(train) - 1] == [pairs(content) for content in train][:-1]
    else:  # long ones are cut and land in several rows; those that fit are whole
        batches = take(cfg.set(packing=packing).build().train_batches(), 6 * len(train))
        segments = {
            tuple(zip(*(batch[name][batch["segment_ids"] == segment] for name in ("inputs", "targets")), strict=True))
            for batch in batches
            for segment in range(1, batch["segment_ids"].max() + 1)
        }
        assert segments >= {pairs(content) for content in train if len(content) < 16}


@pytest.mark.parametrize("packing", [None, FirstFit.Config(open_rows=3)], ids=["concat-then-split", "first-fit"])
def test_segments_and_positions_follow_the_separators(cfg, packing):
    cfg = cfg.set(batch_size=4)
    cfg = cfg.set(piece_bytes=2**20) if packing is None else cfg.set(piece_bytes=2**20, packing=packing)
    for batch in take(cfg.build().train_batches(), 3):
        real = batch["weights"] == 1
        assert ((batch["segment_ids"] > 0) == real).all()
        for row in range(len(real)):
            assert batch["segment_ids"][row, 0] == 1 and batch["positions"][row, 0] == 0
            for column in range(1, real[row].sum()):
                segment, before = batch["segment_ids"][row, [column, column - 1]]
                if batch["inputs"][row, column] == SEP:
                    assert (segment, batch["positions"][row, column]) == (before + 1, 0)
                elif segment == before:
                    assert batch["inputs"][row, column] == batch["targets"][row, column - 1]
                    assert batch["positions"][row, column] == batch["positions"][row, column - 1] + 1
        for values in batch.values():
            assert not values[~real].any()


class Numbered(Source):
    """Documents of one row each, for rows of 8: document `i` repeats the byte `i`."""

    class Config(Source.Config):
        count: int = 13

    def __init__(self, cfg):
        self.cfg = cfg

    def documents(self, split, piece_bytes):
        contents = range(self.cfg.count) if split is Split.TRAIN else range(200, 201)
        return grain.MapDataset.source(contents).map(lambda i: Document(f"number {i}", bytes([i] * 7)))


@pytest.mark.parametrize("count", [13, 40])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_each_document_once_per_epoch(monkeypatch, count, streams):
    monkeypatch.setattr("axcore.train.data.streams._WINDOW_TOKENS", 0)  # so the rows are in the order of the documents
    source = Numbered.Config(count=count)
    cfg = TextInput.Config(source=source, seq_len=8, batch_size=streams, streams=streams, seed=1)
    batches = take(cfg.build().train_batches(), 5 * count)
    read = [int(number) for batch in batches for number in batch["targets"][:, 0]]
    epochs = [read[i * count : (i + 1) * count] for i in range(5 * streams)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == len(epochs)
    neighbour = take(cfg.set(seed=2).build().train_batches(), 5 * count)
    other = [int(number) for batch in neighbour for number in batch["targets"][:, 0]]
    assert all(other[i * count : (i + 1) * count] not in epochs for i in range(5))


def test_windows_of_rows_lose_none(monkeypatch):
    monkeypatch.setattr("axcore.train.data.streams._WINDOW_TOKENS", 2 * 8 * 10)  # windows of 10 rows, 4 an epoch
    cfg = TextInput.Config(source=Numbered.Config(count=80), seq_len=8, batch_size=2, seed=1)
    read = [tuple(batch["targets"][:, 0]) for batch in take(cfg.build().train_batches(), 120)]
    for epoch in (read[:40], read[40:80], read[80:]):
        assert sorted(number for pair in epoch for number in pair) == list(range(80))


def test_the_order_of_a_seed_never_changes():
    # A change here breaks the resuming of every checkpoint: raise ORDER_VERSION.
    cfg = TextInput.Config(source=Numbered.Config(count=30), seq_len=8, batch_size=4, streams=2, seed=5)
    read = [batch["targets"][:, 0].tolist() for batch in take(cfg.build().train_batches(), 5)]
    assert read == GOLDEN
    documents = ShuffledDocuments(grain.MapDataset.range(10**10), derived_seed(5, "documents", "")).repeat()
    assert [documents[i] for i in (*range(4), 10**10)] == GOLDEN_DOCUMENTS


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17, 1000, 5000])
def test_an_order_is_a_permutation(length):
    orders = ShuffledDocuments(grain.MapDataset.range(length), seed=3).repeat()
    epochs = [[orders[i + epoch * length] for i in range(length)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    if length >= 1000:
        places = np.arange(length)
        for one, other in itertools.combinations([*map(np.array, epochs), places], 2):
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / length**0.5
            assert (one == other).sum() < 10  # about 1 is expected
        assert all((np.abs(np.diff(epoch)) == 1).sum() < 12 for epoch in epochs)  # about 2 are expected


def test_shape_and_dtype(cfg):
    inp = cfg.build(process_index=1, process_count=2)
    for batch in (next(inp.train_batches()), next(inp.validation_batches())):
        assert {name: (a.shape, a.dtype) for name, a in batch.items()} == batch_spec(6, 16)
        assert all(array.flags.c_contiguous and array.flags.writeable for array in batch.values())
    assert inp.local_batch_size == 6
    assert inp.vocab_size == 264


@pytest.mark.parametrize("process_count", [1, 2, 3, 6])
def test_processes_share_out_the_global_batch(cfg, process_count):
    whole, parts = (
        cfg.build(),
        [cfg.build(process_index=i, process_count=process_count) for i in range(process_count)],
    )
    for which in ("train_batches", "validation_batches"):
        expected = take(getattr(whole, which)(), 30)
        shards = [take(getattr(part, which)(), 30) for part in parts]
        assert same(joined(shards), expected)


@pytest.mark.parametrize(
    "options",
    [{"prefetch_batches": 0}, {"read_threads": 1}, {"read_threads": 3}, {"prefetch_batches": 40}],
)
def test_reading_ahead_changes_nothing(cfg, options):
    assert same(take(cfg.build().train_batches(), 60), take(cfg.set(**options).build().train_batches(), 60))


def test_seed_picks_the_order(cfg):
    one, two = (row_keys(take(cfg.set(seed=seed).build().train_batches(), 4)) for seed in (3, 4))
    assert one != two
    assert one == row_keys(take(cfg.build().train_batches(), 4))


# ---- resuming


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


# ---- mixtures


def mixture(weights, **options):
    source = Mixture.Config(sources={name: Numbered.Config(count=50) for name in weights}, weights=weights)
    return TextInput.Config(source=source, **{"seq_len": 8, "batch_size": 8, "seed": 1, **options})


class Offset(Numbered):
    """Bytes from 100 on."""

    class Config(Numbered.Config):
        repeats: int = 1

    def documents(self, split, piece_bytes):
        contents = range(100, 100 + self.cfg.count) if split is Split.TRAIN else range(201, 202)
        length = 8 * self.cfg.repeats - 1
        return grain.MapDataset.source(contents).map(lambda i: Document(f"number {i}", bytes([i] * length)))


@pytest.mark.parametrize("streams", [1, 2, 8])
def test_shares_are_of_tokens_and_hold_in_each_batch(streams):
    sources = {"short": Numbered.Config(count=50), "long": Offset.Config(count=20, repeats=30)}
    source = Mixture.Config(sources=sources, weights={"short": 3.0, "long": 1.0})
    cfg = TextInput.Config(source=source, seq_len=8, batch_size=8, streams=streams, seed=1)
    batches = take(cfg.build().train_batches(), 100)
    of_long = [sum(bool(set(range(100, 200)).intersection(row)) for row in batch["targets"]) for batch in batches]
    assert abs(sum(of_long) - 200) <= 4
    assert all(1 <= count <= 3 for count in of_long)


def test_a_mixture_resumes_on_other_processes():
    cfg = mixture({"a": 0.7, "b": 0.2, "c": 0.1})
    expected = take(cfg.build().train_batches(), 30)
    parts = [cfg.build(process_index=i, process_count=2).train_batches() for i in range(2)]
    assert same(joined([take(part, 13) for part in parts]), expected[:13])
    state = json.loads(json.dumps({k: v for part in parts for k, v in part.get_state().items()}))
    parts = [cfg.build(process_index=i, process_count=4).train_batches() for i in range(4)]
    for part in parts:
        part.set_state(state)
    assert same(joined([take(part, 17) for part in parts]), expected[13:])


def test_mixtures_within_mixtures():
    inner = Mixture.Config(sources={"x": Numbered.Config(), "y": Numbered.Config()}, weights={"x": 1.0, "y": 3.0})
    source = Mixture.Config(sources={"a": inner, "b": Offset.Config()}, weights={"a": 2.0, "b": 2.0})
    assert {name: share for name, (share, _) in source.build().parts().items()} == {
        "a.x": 0.125,
        "a.y": 0.375,
        "b": 0.5,
    }
    cfg = TextInput.Config(source=source, seq_len=8, batch_size=8)
    assert cfg.build().validation_byte_count == 3 * 7
    assert b"".join(cfg.build().validation_bytes()) == bytes([200] * 14 + [201] * 7)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1.0, "b": 0.0}, r"input\.source: weights\.b=0\.0 must be positive .* remove it"),
        ({"a": 1.0, "b": float("nan")}, r"weights\.b=nan must be positive"),
        ({"a": 1.0}, r"the weights are \['a'\], but the sources are \['a', 'b'\]"),
    ],
)
def test_invalid_weights(weights, message):
    cfg = mixture({"a": 1.0, "b": 1.0})
    cfg = cfg.set(source=cfg.source.set(weights=weights))
    with pytest.raises(ConfigError, match=message):
        cfg.build()


def test_errors_of_a_part_name_its_path(tmp_path):
    source = Mixture.Config(sources={"web": TextFiles.Config(folder=str(tmp_path / "no"))}, weights={"web": 1.0})
    with pytest.raises(ConfigError, match=r"input\.source.*: folder='.*no' does not exist"):
        TextInput.Config(source=source, seq_len=8, batch_size=8).build()
    with pytest.raises(ConfigError, match=r"input\.source\.sources\.web: validation_percent=0\.0"):
        source = source.set(sources={"web": source.sources["web"].set(validation_percent=0.0)})
        TextInput.Config(source=source, seq_len=8, batch_size=8).build()


# ---- validation


@pytest.mark.parametrize("piece_bytes", [10, None])
@pytest.mark.parametrize("batch_size", [1, 12, 50])
def test_validation_predicts_each_byte_once(cfg, files, batch_size, piece_bytes):
    _, validation = halves(cfg, files)
    cfg = cfg.set(batch_size=batch_size, piece_bytes=piece_bytes)
    inp = cfg.build()
    batches = list(inp.validation_batches())
    assert len(batches) == -(-(len(plain_stream(validation)) - 1) // (16 * batch_size))
    tokens = [SEP]
    for batch in batches:
        assert batch["inputs"].shape == (batch_size, 16)
        tokens += batch["targets"][batch["weights"] == 1].tolist()
    assert tokens == plain_stream(validation)
    assert b"".join(inp.validation_bytes()) == b"".join(validation) == bytes(t for t in tokens if t != SEP)
    assert inp.validation_byte_count == len(b"".join(validation))
    assert same(list(inp.validation_batches()), batches)
    stream = plain_stream(validation)
    for number, batch in enumerate(batches):
        rows = range(number * batch_size, (number + 1) * batch_size)
        assert_batch(batch, stack([plain_row(stream, i, 16) for i in rows]))


def test_training_leaves_validation_alone(cfg):
    inp = cfg.build()
    before = list(inp.validation_batches())
    take(inp.train_batches(), 30)
    assert same(list(inp.validation_batches()), before)
    assert same(list(cfg.set(seed=9).build().validation_batches()), before)


# ---- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 5}, r"^input: batch_size=5 cannot be split evenly among 2 processes\. Make it a multiple of 2"),
        ({"streams": 5}, "^input: streams=5 is not a divisor of batch_size=12"),
        (
            {"streams": 3},
            "^input: streams=3 cannot be split evenly among 2 processes.* divisor of batch_size=12 .* multiple of 2",
        ),
        (
            {"batch_size": 1000},
            r"input.source: .* has \d+ tokens, fewer than one batch of batch_size=1000 rows of seq_",
        ),
        ({"seq_len": 100_000}, "tokens, fewer than one batch of .* seq_len=100000"),
        ({"seq_len": 0}, "^input: seq_len must be at least 1, not 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"streams": 0}, "streams must be at least 1, not 0"),
        ({"prefetch_batches": -1}, "prefetch_batches must be at least 0, not -1"),
        ({"read_threads": -1}, "read_threads must be at least 0, not -1"),
        ({"packing": FirstFit.Config(open_rows=0)}, "^input.packing: open_rows must be at least 1"),
        ({"tokenizer": ByteTokenizer.Config(vocab_multiple=0)}, "^input.tokenizer: .*vocab_multiple must be positive"),
    ],
)
def test_numbers_out_of_range(cfg, options, message):
    with pytest.raises(ConfigError, match=message):
        cfg.set(**options).build(process_index=0, process_count=2)


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0)])
def test_process_index_out_of_range(cfg, index, count):
    with pytest.raises(ValueError, match="process_index"):
        cfg.build(process_index=index, process_count=count)


def test_required_fields():
    with pytest.raises(ConfigError, match="seq_len, batch_size, source is REQUIRED"):
        TextInput.Config().build()


@pytest.mark.parametrize("prefetch_batches", [0, 4])
def test_an_error_while_reading_names_the_document(cfg, files, tmp_path, prefetch_batches):
    shutil.copytree(cfg.source.folder, tmp_path / "copy")
    source = cfg.source.set(folder=str(tmp_path / "copy"))
    inp = cfg.set(source=source, prefetch_batches=prefetch_batches).build()
    last = next(n for n in sorted(files, reverse=True) if not source.build().is_validation(n) and len(files[n]) > 30)
    (tmp_path / "copy" / last).unlink()
    batches = inp.train_batches()
    with pytest.raises(AxcoreError, match=f"cannot read .*{last}: No such file"):
        take(batches, 1000)
    batches.close()
