"""Training batches against the texts that they contain."""

import itertools

import grain
import numpy as np
import pytest

from axcore.train.data import FirstFit, TextInput, batch_spec
from axcore.train.data.order import ShuffledDocuments
from axcore.train.data.streams import derived_seed

from .reading import SEP, Numbered, halves, joined, same, take

GOLDEN = [[18, 8, 26, 17], [16, 3, 6, 0], [24, 2, 21, 5], [27, 1, 14, 22], [25, 12, 10, 23]]
GOLDEN_DOCUMENTS = [5461264980, 8975911350, 4755496197, 4597197433, 4898944078]


def row_keys(batches):
    """One hashable value for each row."""
    return [row.tobytes() for batch in batches for row in np.concatenate([batch["inputs"], batch["targets"]], 1)]


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
