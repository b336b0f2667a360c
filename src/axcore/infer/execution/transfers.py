"""Moves decoding state out of the device and back, and between slots and saved states."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping

import jax
import numpy as np

from axcore.infer.execution.row_state import Blocks, RowState
from axcore.infer.execution.state_programs import StatePrograms
from axcore.infer.scheduling.host_pool import HostLimits
from axcore.infer.sequences import Transfer


@dataclasses.dataclass
class _Copy:
    """Blocks that are on their way to the host, and where they go."""

    plan: int
    target: dict[str, np.ndarray]
    at: tuple[int, ...]
    blocks: Blocks


class Transfers:
    """Runs the transfers of plans.

    Copies to the host are started without waiting, and finished when the results of a step are read, or when a later
    transfer needs them.

    Args:
        programs: the programs that read and write the state.
        limits: the size of host memory.
        num_states: the number of saved states, which are slots on the device.

    Attributes:
        bytes_to_host, bytes_to_device: what was copied so far, without padding.
        exported: the state of exported sequences, by id, until it is taken.
    """

    def __init__(self, programs: StatePrograms, limits: HostLimits, num_states: int = 0):
        self.exported: dict[int, RowState] = {}
        self._programs, self._layout = programs, programs.layout
        # Allocated once. The system commits the memory on first use.
        self._host_pages = _empty(self._layout.pages, limits.num_pages)
        self._host_slots = _empty(self._layout.slot, limits.num_slots)
        # Allocated now, so that an engine that starts has the memory.
        self._states = programs.empty_slots(num_states)
        self._copies: deque[_Copy] = deque()
        self._plan = self.bytes_to_host = self.bytes_to_device = 0

    def start(self, transfers: Iterable[Transfer], plan: int) -> None:
        """Runs the transfers of a plan in their order. Only those that read host memory may wait for the device."""
        self._plan = plan
        run = {
            "offload": self._offload,
            "restore": self._restore,
            "export": self._export,
            "import": self._import,
            "save": self._save,
            "load": self._load,
        }
        for transfer in transfers:
            run[transfer.kind](transfer)

    def free(self) -> None:
        """Frees the saved states."""
        self._states.clear()

    def finish(self, plan: int) -> None:
        """Waits for the copies to the host of this plan and of those before it."""
        while self._copies and self._copies[0].plan <= plan:
            copy = self._copies.popleft()
            blocks = jax.device_get(copy.blocks)
            for path, block in blocks.items():
                copy.target[path][list(copy.at)] = block[: len(copy.at)]

    def _offload(self, transfer: Transfer) -> None:
        layout, at = self._layout, 0
        for count, blocks in self._programs.read_pages(transfer.pages):
            self._copy(self._host_pages, transfer.host_pages[at : at + count], blocks)
            self.bytes_to_host += count * layout.page_bytes
            at += count
        if transfer.host_slot is not None and layout.slot:
            assert transfer.slot is not None
            self._copy(self._host_slots, (transfer.host_slot,), self._programs.read_slot(transfer.slot))
            self.bytes_to_host += layout.slot_bytes

    def _copy(self, target: dict[str, np.ndarray], at: tuple[int, ...], blocks: Blocks) -> None:
        for block in blocks.values():
            assert isinstance(block, jax.Array)
            block.copy_to_host_async()
        self._copies.append(_Copy(self._plan, target, at, blocks))

    def _restore(self, transfer: Transfer) -> None:
        self.finish(self._plan)
        self._programs.write_pages(transfer.pages, _taken(self._host_pages, transfer.host_pages))
        self.bytes_to_device += len(transfer.pages) * self._layout.page_bytes
        if transfer.slot is not None:
            slot = {} if transfer.host_slot is None else _taken(self._host_slots, (transfer.host_slot,))
            self._write_slot(transfer, slot)

    def _import(self, transfer: Transfer) -> None:
        state = transfer.handover
        assert isinstance(state, RowState)
        first = transfer.first_page
        if state.is_on_host:
            for group in state.pages:
                self._programs.write_pages(transfer.pages, {path: block[first:] for path, block in group.items()})
        else:
            pages, start = (*[self._programs.unused] * first, *transfer.pages), 0
            for group in state.pages:
                size = len(next(iter(group.values())))
                self._programs.write_group(pages[start : start + size], size, group)
                start += size
        self.bytes_to_device += len(transfer.pages) * self._layout.page_bytes
        self._write_slot(transfer, state.slot)

    def _write_slot(self, transfer: Transfer, blocks: Blocks) -> None:
        assert transfer.slot is not None
        self._programs.write_slot(transfer.slot, transfer.num_tokens, blocks)
        self.bytes_to_device += self._layout.slot_bytes

    def _save(self, transfer: Transfer) -> None:
        assert transfer.slot is not None
        self._states[transfer.state] = self._programs.read_slot(transfer.slot)

    def _load(self, transfer: Transfer) -> None:
        assert transfer.slot is not None
        self._programs.write_slot(transfer.slot, transfer.num_tokens, self._states[transfer.state])

    def _export(self, transfer: Transfer) -> None:
        layout = self._layout
        assert transfer.sequence is not None and transfer.slot is not None
        pages = tuple(blocks for _, blocks in self._programs.read_pages(transfer.pages))
        slot = self._programs.read_slot(transfer.slot)
        self.exported[transfer.sequence.id] = RowState(transfer.num_tokens, layout.page_size, pages, slot)


def _taken(arrays: Mapping[str, np.ndarray], at: tuple[int, ...]) -> Blocks:
    """New arrays, since JAX on CPU may read NumPy memory after a call returns."""
    return {path: array[list(at)] for path, array in arrays.items()} if at else {}


def _empty(blocks: Mapping[str, jax.ShapeDtypeStruct], count: int | None) -> dict[str, np.ndarray]:
    return {path: np.empty((count, *block.shape), block.dtype) for path, block in blocks.items()} if count else {}
