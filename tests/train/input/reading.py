"""Helpers for the tests of the text input."""

import itertools

import grain
import numpy as np

from axcore.train.data import Document, Source, Split

SEP = 256


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


def joined(shards):
    """Global batches from those of each process."""
    return [
        {name: np.concatenate([shard[name] for shard in together]) for name in together[0]}
        for together in zip(*shards, strict=True)
    ]


class Numbered(Source):
    """Documents of one row each, for rows of 8: document `i` repeats the byte `i`."""

    class Config(Source.Config):
        count: int = 13

    def __init__(self, cfg):
        self.config = cfg

    def documents(self, split, piece_bytes):
        contents = range(self.config.count) if split is Split.TRAIN else range(200, 201)
        return grain.MapDataset.source(contents).map(lambda i: Document(f"number {i}", bytes([i] * 7)))
