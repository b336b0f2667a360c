"""Validation batches against a plain-Python reading of the same files, written from the documentation alone."""

import pytest

from axcore.train.data import batch_spec

from .reading import SEP, halves, same, take


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
