"""Which adapters an engine has loaded."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from axcore.config import AxcoreError, ConfigError, did_you_mean


class LoadedAdapter(NamedTuple):
    """An adapter in a slot of the decoding model.

    Attributes:
        name: its name in requests.
        version: a number that no other adapter of the engine has had, also not one of the same name.
        slot: its slot.
        identity: identifies its weights, also in other engines; see `Adapters.identity`.
    """

    name: str
    version: int
    slot: int
    identity: str

    @property
    def key(self) -> str:
        """Its name and version, for the keys of cached prefixes."""
        return f"{self.name}:{self.version}"


class LoadedAdapters:
    """The adapters that requests can use, by name.

    Slots of adapters that were replaced or removed are free again when no sequence uses them. The engine's thread calls
    the methods that change anything. Any thread may call the others.

    Args:
        num_slots: the number of slots; 0: the engine has no adapters.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._num_loaded = 0
        self._by_name: dict[str, LoadedAdapter] = {}  # replaced as a whole, since other threads read it

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order in which they were first loaded."""
        return tuple(self._by_name)

    def find(self, name: str) -> LoadedAdapter:
        """The newest adapter of a name.

        Raises:
            ConfigError: there is none.
        """
        found = self._by_name.get(name)
        if found is not None:
            return found
        if not self.num_slots:
            raise ConfigError(
                f"request.adapter={name!r}: the engine has no adapters. Use None, or set engine.adapters, for example "
                f"to that of axcore-lora"
            )
        known = ", ".join(map(repr, self._by_name)) or "no adapter"
        raise ConfigError(
            f"request.adapter={name!r} is not loaded; the engine has {known}.{did_you_mean(name, self._by_name)} Load "
            f"it with engine.load_adapter({name!r}, ...), or use None for the model alone"
        )

    def free_slot(self, name: str, in_use: Collection[LoadedAdapter]) -> int:
        """A slot for an adapter with this name, which may replace another.

        Args:
            in_use: the adapters of all sequences that have not ended.

        Raises:
            AxcoreError: there is none.
        """
        kept = {each.slot for each in self._by_name.values() if each.name != name}
        used = kept | {each.slot for each in in_use}
        free = [slot for slot in range(self.num_slots) if slot not in used]
        if free:
            return free[0]
        if len(kept) == self.num_slots:
            raise ConfigError(
                f"engine.adapters.max_adapters={self.num_slots} adapters are loaded: {', '.join(map(repr, self.names))}"
                f". Unload one before {name!r}, or raise max_adapters"
            )
        raise AxcoreError(
            f"adapter {name!r}: running requests still use the slots of adapters that were unloaded or replaced. Wait "
            f"for their end, or raise engine.adapters.max_adapters={self.num_slots}"
        )

    def add(self, name: str, slot: int, identity: str) -> LoadedAdapter:
        """Records that an adapter is in a slot. It replaces one of the same name."""
        self._num_loaded += 1
        new = LoadedAdapter(name, self._num_loaded, slot, identity)
        self._by_name = {**self._by_name, name: new}
        return new

    def remove(self, name: str) -> None:
        """Forgets an adapter.

        Raises:
            ConfigError: it is not loaded.
        """
        self.find(name)
        self._by_name = {other: each for other, each in self._by_name.items() if other != name}
