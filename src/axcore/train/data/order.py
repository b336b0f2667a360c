"""The order of documents in endless training: each once per epoch, in a new order each epoch."""

from __future__ import annotations

import functools
import hashlib
import operator
from typing import SupportsIndex, TypeVar

import grain

T = TypeVar("T")
_ROUNDS = 6
_MULTIPLIER = 0xD6E8FEB86659FD93


class ShuffledDocuments(grain.MapDataset[T]):
    """A dataset in random order. Each epoch (`len` consecutive indices) has a new order.

    Each index is computed independently, in constant memory. grain's own shuffle takes milliseconds per element if a
    dataset has fewer than a hundred elements, gives epoch 1 of a seed the order of epoch 0 of the next seed, and may
    change between versions.
    """

    def __init__(self, parent: grain.MapDataset[T], seed: int):
        super().__init__(parent)
        self._seed = seed
        # Threads may read the end of one epoch and the start of the next at the same time.
        self._keys = functools.lru_cache(maxsize=4)(self._new_keys)

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: SupportsIndex) -> T:
        length = len(self._parent)
        epoch, place = divmod(operator.index(index), length)
        return self._parent[epoch * length + permute(place, length, self._keys(epoch))]

    def _new_keys(self, epoch: int) -> tuple[int, ...]:
        digest = hashlib.sha512(f"{self._seed} {epoch}".encode()).digest()
        return tuple(int.from_bytes(digest[at : at + 8], "big") for at in range(0, 8 * _ROUNDS, 8))


def permute(index: int, length: int, keys: tuple[int, ...]) -> int:
    """Applies a permutation of `range(length)` to `index`: a Feistel network over the next power of four, repeated
    until the result is in the range.

    Args:
        index: in `range(length)`.
        length: at least 1.
        keys: 64-bit numbers that select the permutation, one per round.
    """
    bits = max(1, ((length - 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    while True:
        left, right = index >> bits, index & mask
        for key in keys:
            mixed = (right ^ key) * _MULTIPLIER & 0xFFFFFFFFFFFFFFFF
            mixed = (mixed ^ mixed >> 32) * _MULTIPLIER & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ (mixed >> 32 & mask)
        index = left << bits | right
        if index < length:
            return index
