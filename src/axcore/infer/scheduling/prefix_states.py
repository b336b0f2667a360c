"""The saved states of rows at page boundaries, from which later rows with the same prefix start."""

from __future__ import annotations

from collections.abc import Sequence

from axcore.infer.scheduling.pages import PrefixKey


class PrefixStates:
    """Finds saved states of rows, and makes room for new ones.

    Layers whose state is not in pages, such as recurrent layers, keep only that of the newest tokens of a row. For such
    a model, a prefix can be shared where the state of a row was saved. Each saved state belongs to the key of the page
    that ends there. The least recently used one makes room for a new one.

    Args:
        num_states: the number of saved states.
    """

    def __init__(self, num_states: int):
        self.num_states = num_states
        self._saved: dict[PrefixKey, int] = {}  # the least recently used first
        self._free = list(reversed(range(num_states)))

    @property
    def num_saved(self) -> int:
        """The number of states that a row can start from."""
        return len(self._saved)

    def match(self, keys: Sequence[PrefixKey]) -> int:
        """The number of pages of the longest prefix whose state is saved."""
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in self._saved), 0)

    def use(self, key: PrefixKey) -> int:
        """The number of a saved state, which is now the most recently used one."""
        self._saved[key] = number = self._saved.pop(key)
        return number

    def save(self, key: PrefixKey) -> int | None:
        """Makes room for a state. Returns its number; None if the state is saved already."""
        if key in self._saved:
            self.use(key)
            return None
        number = self._free.pop() if self._free else self._saved.pop(next(iter(self._saved)))
        self._saved[key] = number
        return number

    def flush(self) -> None:
        """Forgets all states, because the weights changed."""
        self._free.extend(self._saved.values())
        self._saved.clear()
