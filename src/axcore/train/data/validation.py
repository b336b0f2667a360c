"""Validation batches: the validation text once, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Int32

from axcore.train.data.batch import Batch, make_batch, make_rows
from axcore.train.data.source import Document
from axcore.train.data.streams import encode
from axcore.train.data.tokenizers import Tokenizer


def validation_batches(
    documents: Iterable[Document], tokenizer: Tokenizer, *, seq_len: int, batch_size: int, rows: slice
) -> Iterator[Batch]:
    """The given rows of each global batch.

    The documents form one sequence of tokens (separator, document, separator, document, ...). Each token except the
    first is a target of weight 1 exactly once. All batches have one shape, and padding has weight 0.

    Args:
        documents: the documents in order. Pieces of a text must be consecutive.
        tokenizer: encodes them.
        seq_len: tokens in a row.
        batch_size: rows of a global batch.
        rows: the rows to return.
    """
    size = batch_size * seq_len

    def batch(tokens: Int32[np.ndarray, " tokens"]) -> Batch:
        count = len(tokens) - 1
        padded = np.concatenate([tokens, np.zeros(size - count, np.int32)])
        inputs, targets = (each.reshape(batch_size, seq_len)[rows] for each in (padded[:-1], padded[1:]))
        made = make_rows(inputs, targets, inputs == tokenizer.separator_id)
        real = np.arange(size).reshape(batch_size, seq_len)[rows] < count
        return make_batch(made * real[:, None])

    parts: list[Int32[np.ndarray, " tokens"]] = []
    held = 0
    for document in documents:
        parts.append(encode(tokenizer, document))
        held += len(parts[-1])
        if held <= size:
            continue
        tokens = np.concatenate(parts)
        while len(tokens) > size:
            yield batch(tokens[: size + 1])
            tokens = tokens[size:]
        parts, held = [tokens], len(tokens)
    if held > 1:
        yield batch(np.concatenate(parts))
