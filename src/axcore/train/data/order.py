"""The order of windows in endless training: every window once an epoch, in a new order each epoch."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray


class EpochOrder:
    """Maps the place of a row in endless training (0, 1, 2, ...) to a window.

    Places `[e*W, e*W + W)` are epoch `e`, a permutation of the `W` windows. A pure function of its arguments:
    any process can compute any place, and the orders do not depend on the versions of the libraries.
    """

    def __init__(self, num_windows: int, *, seed: int, shuffle: bool):
        """
        Args:
            num_windows: `W`, at least 1.
            seed: picks the permutations, with the epoch.
            shuffle: False keeps the stream's order in each epoch.
        """
        self._num_windows = num_windows
        self._seed = seed
        self._shuffle = shuffle
        # Threads read around an epoch's end, where two permutations are in use.
        self._permutation = functools.lru_cache(maxsize=2)(self._new_permutation)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The window at each place; the shape is that of `places`."""
        epochs, windows = np.divmod(places, self._num_windows)
        if not self._shuffle:
            return windows
        for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
            chosen = epochs == epoch
            windows[chosen] = self._permutation(epoch)[windows[chosen]]
        return windows

    def _new_permutation(self, epoch: int) -> NDArray[np.int64]:
        # Sorting a counter-based generator's raw words: NumPy keeps those for ever, but not
        # `Generator.permutation`. Seed and epoch are separate words of the key, so that neighbouring seeds
        # share no epoch.
        key = [self._seed % 2**64, epoch]
        words = np.random.Philox(key=np.array(key, np.uint64)).random_raw(self._num_windows)
        return np.argsort(words, kind="stable")
