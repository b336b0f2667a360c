"""The text input against a plain-Python reading of the same files."""

import itertools
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from axcore.config import AxcoreError, ConfigError
from axcore.train.data import ByteTokenizer, Document, TextFiles, TextInput, batch_spec
from axcore.train.data.order import EpochOrder
from axcore.train.data.windows import Windows, token_stream

SEP = 256


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
    return TextInput.Config(source=source, seq_len=16, batch_size=6, seed=3, prefetch_batches=5)


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


# ---- windows


@given(
    contents=st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=12),
    seq_len=st.integers(1, 20),
    pad_to=st.none() | st.integers(1, 4),
)
@settings(deadline=None, max_examples=150)
def test_windows_hold_what_the_plain_loop_says(contents, seq_len, pad_to):
    documents = [Document(str(i), content) for i, content in enumerate(contents)]
    tokens = token_stream(documents, ByteTokenizer.Config().build())
    stream = plain_stream(contents)
    assert tokens.tolist() == stream
    windows = Windows(tokens, seq_len, SEP, pad_to)

    num_targets = len(stream) - 1
    if pad_to is None:
        assert len(windows) == num_targets // seq_len
    else:
        assert len(windows) % pad_to == 0
        assert len(windows) * seq_len >= num_targets > (len(windows) - pad_to) * seq_len
    if len(windows):
        rows = list(range(len(windows)))[::-1]
        assert_batch(windows.batch(np.array(rows)), stack([plain_row(stream, i, seq_len) for i in rows]))


def test_arrays_are_new_and_writable():
    windows = Windows(np.arange(33, dtype=np.uint16), 8, SEP)
    first = windows.batch(np.array([0, 1]))
    for values in first.values():
        values += 1
    assert windows.batch(np.array([0]))["inputs"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_windows_are_views():
    stream = np.zeros(8 * 1000 + 1, np.uint16)
    windows = Windows(stream, 8, SEP)
    stream[8] = 5
    assert windows.batch(np.array([1]))["inputs"][0, 0] == 5


# ---- the order


@given(st.integers(1, 50), st.integers(0, 2**70), st.integers(0, 2**40))
@settings(deadline=None)
def test_each_epoch_is_a_permutation(num_windows, seed, epoch):
    order = EpochOrder(num_windows, seed=seed, shuffle=True)
    places = np.arange(epoch * num_windows, (epoch + 1) * num_windows)
    assert sorted(order(places)) == list(range(num_windows))


def test_a_place_has_one_window_however_it_is_asked_for():
    order = EpochOrder(7, seed=1, shuffle=True)
    together = order(np.arange(70))
    assert [int(EpochOrder(7, seed=1, shuffle=True)(np.array([i]))[0]) for i in range(70)] == together.tolist()
    assert order(np.arange(70).reshape(5, 14)).tolist() == together.reshape(5, 14).tolist()


def test_the_order_of_a_seed_never_changes():
    # A change here breaks the resuming of every checkpoint.
    order = EpochOrder(8, seed=5, shuffle=True)
    words = [np.random.Philox(key=np.array([5, epoch], np.uint64)).random_raw(8).tolist() for epoch in range(2)]
    expected = [sorted(range(8), key=epoch_words.__getitem__) for epoch_words in words]
    assert order(np.arange(16)).reshape(2, 8).tolist() == expected
    assert expected == [[2, 4, 3, 1, 5, 0, 6, 7], [7, 4, 5, 1, 6, 0, 2, 3]]


def test_epochs_and_seeds_are_unrelated():
    size = 2000
    orders = {
        (seed, epoch): EpochOrder(size, seed=seed, shuffle=True)(np.arange(epoch * size, (epoch + 1) * size))
        for seed in (0, 1, 2, -1)
        for epoch in (0, 1, 2)
    }
    orders["stream"] = np.arange(size)
    for (_, one), (_, two) in itertools.combinations(orders.items(), 2):
        assert abs(np.corrcoef(one, two)[0, 1]) < 0.12  # 5 standard deviations
        assert (one == two).sum() < 10  # about 1 is expected
    for order in list(orders.values())[:-1]:
        assert (np.diff(order) == 1).sum() < 10  # neighbours in the text are not neighbours in a batch


# ---- training


def test_an_epoch_predicts_each_byte_once(cfg, files):
    inp = cfg.build()
    train, _ = halves(cfg, files)
    stream = plain_stream(train)
    count = (len(stream) - 1) // cfg.seq_len
    assert inp.batches_per_epoch == count / cfg.batch_size
    assert inp.train_byte_count == sum(map(len, train))

    expected = sorted(map(str, (plain_row(stream, i, cfg.seq_len) for i in range(count))))
    rows = []
    for batch in take(inp.train_batches(), -(-3 * count // cfg.batch_size)):
        for row in range(cfg.batch_size):
            rows.append(str({name: values[row].tolist() for name, values in batch.items()}))
    epochs = [rows[i * count : (i + 1) * count] for i in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == expected
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_without_shuffling_the_documents_can_be_read_off(cfg, files):
    inp = cfg.set(shuffle=False).build()
    train, _ = halves(cfg, files)
    tokens = [SEP]
    for batch in take(inp.train_batches(), int(inp.batches_per_epoch)):
        tokens += batch["targets"][batch["weights"] == 1].tolist()
    read = bytes(t for t in tokens if t != SEP)
    assert b"".join(train).startswith(read)
    assert len(read) > sum(map(len, train)) - cfg.seq_len * cfg.batch_size
    assert tokens == plain_stream(train)[: len(tokens)]


def test_shape_and_dtype(cfg):
    inp = cfg.build(process_index=1, process_count=2)
    for batch in (next(inp.train_batches()), next(inp.validation_batches())):
        assert {name: (a.shape, a.dtype) for name, a in batch.items()} == batch_spec(3, 16)
        assert all(array.flags.c_contiguous and array.flags.writeable for array in batch.values())
    assert inp.local_batch_size == 3
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
        joined = [
            {name: np.concatenate([shard[name] for shard in together]) for name in together[0]}
            for together in zip(*shards, strict=True)
        ]
        assert same(joined, expected)


@pytest.mark.parametrize(
    "options",
    [{"prefetch_batches": 0}, {"prefetch_threads": 0}, {"prefetch_threads": 3}, {"prefetch_batches": 40}],
)
def test_reading_ahead_changes_nothing(cfg, options):
    assert same(take(cfg.build().train_batches(), 60), take(cfg.set(**options).build().train_batches(), 60))


def test_seed_picks_the_order(cfg):
    one, two = (row_keys(take(cfg.set(seed=seed).build().train_batches(), 4)) for seed in (3, 4))
    assert one != two
    assert one == row_keys(take(cfg.build().train_batches(), 4))


# ---- resuming


def test_state_does_not_count_what_was_read_ahead(cfg):
    inp = cfg.build()
    expected = take(inp.train_batches(), 60)
    per_epoch = inp.batches_per_epoch
    assert per_epoch < 25 and per_epoch % 1  # the states below lie on both sides of ends of epochs, and on one
    for stop in (0, 1, 2, 4, 5, 6, int(per_epoch), int(per_epoch) + 1, int(2 * per_epoch) + 1, 50):
        batches = inp.train_batches()
        assert same(take(batches, stop), expected[:stop])
        state = batches.get_state()
        assert same(take(batches, 3), expected[stop : stop + 3])  # asking for the state disturbs nothing
        fresh = cfg.set(prefetch_batches=stop % 4).build().train_batches()
        next(fresh)
        fresh.set_state(state)
        assert fresh.get_state() == state
        assert same(take(fresh, 10), expected[stop : stop + 10])
        fresh.set_state(state)  # back again
        assert same(take(fresh, 2), expected[stop : stop + 2])


def test_state_fits_another_number_of_processes(cfg):
    expected = take(cfg.build().train_batches(), 12)
    half = cfg.build(process_index=1, process_count=2).train_batches()
    take(half, 9)
    states = {half.get_state()}
    third = cfg.build(process_index=2, process_count=3).train_batches()
    third.set_state(states.pop())
    assert same(take(third, 3), [{name: a[4:6] for name, a in batch.items()} for batch in expected[9:]])


def test_resuming_in_a_new_process_is_exact(cfg, tmp_path):
    code = """
import itertools, json, sys
from axcore.train.data import TextFiles, TextInput
job = json.load(open(sys.argv[1]))
for shard, states in enumerate(job["states"]):
    cfg = TextInput.Config(**{**job["cfg"], "source": TextFiles.Config(**job["source"])})
    batches = cfg.build(process_index=shard, process_count=len(job["states"])).train_batches()
    for state in states:
        batches.set_state(state.encode())
        rows = [{name: a.tolist() for name, a in b.items()} for b in itertools.islice(batches, job["count"])]
        print(json.dumps(rows))
"""
    count, shards = 4, 3
    stops = [0, 3, int(cfg.build().batches_per_epoch) - 1, 40]
    states, expected = [], []
    for shard in range(shards):
        batches = cfg.build(process_index=shard, process_count=shards).train_batches()
        states.append([])
        for stop in stops:
            batches.set_state(json.dumps({**json.loads(batches.get_state()), "next_batch": 0}).encode())
            take(batches, stop)
            states[-1].append(batches.get_state().decode())
            expected.append([{name: a.tolist() for name, a in b.items()} for b in take(batches, count)])
    options = {"seq_len": 16, "batch_size": 6, "seed": 3, "prefetch_batches": 5}
    source = {"folder": cfg.source.folder, "validation_percent": 30.0}
    (tmp_path / "job").write_text(json.dumps({"cfg": options, "source": source, "states": states, "count": count}))
    env = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = [sys.executable, "-c", code, str(tmp_path / "job")]
    output = subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout
    assert [json.loads(line) for line in output.splitlines()] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 4}, "seed was 3, is 4"),
        ({"batch_size": 12}, "batch_size was 6, is 12"),
        ({"seq_len": 8}, "seq_len was 16, is 8"),
        ({"shuffle": False}, "shuffle was True, is False"),
    ],
)
def test_state_of_another_input(cfg, options, message):
    state = cfg.build().train_batches().get_state()
    with pytest.raises(AxcoreError, match=f"differs from the one of the saved state .*{message}"):
        cfg.set(**options).build().train_batches().set_state(state)


def test_state_of_another_text(cfg):
    state = cfg.build().train_batches().get_state()
    source = cfg.source.set(exclude=("0/00.txt", "1/01.txt", "2/02.txt"))
    other = cfg.set(source=source).build().train_batches()
    with pytest.raises(AxcoreError, match=r"text was '[0-9a-f]+', is '[0-9a-f]+'"):
        other.set_state(state)


@pytest.mark.parametrize("state", [b"", b"\x80\x04", b"[]", b"3", b"{}", b'{"next_batch": "x"}', b'{"next_batch": -1}'])
def test_what_is_no_state(cfg, state):
    with pytest.raises(AxcoreError, match=r"is not a state that TrainBatches\.get_state gave"):
        cfg.build().train_batches().set_state(state)


def test_close_may_be_called_twice(cfg):
    batches = cfg.build().train_batches()
    next(batches)
    batches.close()
    batches.close()


# ---- validation


@pytest.mark.parametrize("batch_size", [1, 6, 50])
def test_validation_predicts_each_byte_once(cfg, files, batch_size):
    _, validation = halves(cfg, files)
    cfg = cfg.set(batch_size=batch_size)
    inp = cfg.build()
    batches = list(inp.validation_batches())
    assert len(batches) == -(-(len(plain_stream(validation)) - 1) // (16 * batch_size))
    tokens = [SEP]
    for batch in batches:
        assert batch["inputs"].shape == (batch_size, 16)
        tokens += batch["targets"][batch["weights"] == 1].tolist()
    assert tokens == plain_stream(validation)
    assert inp.validation_bytes == b"".join(validation) == bytes(t for t in tokens if t != SEP)
    assert inp.validation_byte_count == len(inp.validation_bytes)
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
        ({"batch_size": 5}, "batch_size=5 does not divide among 2 processes"),
        (
            {"batch_size": 1000},
            r"has \d+ tokens and makes \d+ windows of seq_len=16, fewer than batch_size=1000",
        ),
        ({"seq_len": 100_000}, "makes 0 windows of seq_len=100000"),
        ({"seq_len": 0}, "seq_len must be at least 1, not 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"prefetch_batches": -1}, "prefetch_batches must be at least 0, not -1"),
        ({"prefetch_threads": -1}, "prefetch_threads must be at least 0, not -1"),
    ],
)
def test_sizes_that_cannot_be(cfg, options, message):
    with pytest.raises(ConfigError, match=message):
        cfg.set(**options).build(process_index=0, process_count=2)


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0)])
def test_process_index_out_of_range(cfg, index, count):
    with pytest.raises(ValueError, match="process_index"):
        cfg.build(process_index=index, process_count=count)


def test_what_must_be_given():
    with pytest.raises(ConfigError, match="seq_len, batch_size, source is REQUIRED"):
        TextInput.Config().build()
