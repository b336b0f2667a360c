"""The processes of the run, and their shared key-value store (jax's coordination service)."""

from __future__ import annotations

import dataclasses
import sys
from typing import Protocol


class Store(Protocol):
    """The methods of jax's coordination-service client that axcore uses. Process 0 hosts the service."""

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None: ...
    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes: ...
    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]: ...
    def key_value_delete(self, key: str) -> None: ...


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """The processes of this run.

    Attributes:
        index: the index of this process.
        count: the number of processes; at least 2.
        store: the key-value store that all processes share.
    """

    index: int
    count: int
    store: Store

    def named(self, index: int) -> str:
        return f"process {index} of {self.count}"


def process_group() -> ProcessGroup | None:
    """The processes of this run, or None with one process. Also works if user code initialized `jax.distributed`."""
    if "jax" not in sys.modules:
        return None
    from jax._src.distributed import global_state  # jax has no public API for its client

    if global_state.client is None or global_state.num_processes == 1:
        return None
    return ProcessGroup(global_state.process_id, global_state.num_processes, global_state.client)


def index() -> int:
    """The index of this process. Unlike `jax.process_index`, it does not initialize jax's devices."""
    group = process_group()
    return 0 if group is None else group.index


def count() -> int:
    """The number of processes. Unlike `jax.process_count`, it does not initialize jax's devices."""
    group = process_group()
    return 1 if group is None else group.count
