"""Moves decoding state out of the device and back: pages of paged caches, and slots of other caches and layers."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Shaped

from axcore.config import ConfigError
from axcore.infer.buckets import bucket
from axcore.infer.decoder import Decoder, state_shardings
from axcore.infer.host_pool import HostLimits
from axcore.infer.programs import Programs
from axcore.infer.sequences import Transfer
from axcore.module import Tree

PAGES_PER_CALL = (1, 4, 16)
"""The numbers of pages for which programs are compiled. Other numbers take several calls, the last of them padded."""

Blocks = Mapping[str, Shaped[Array | np.ndarray, "..."]]
"""Parts of the arrays of the decoding state, by path. The axis of pages or of slots is the first."""


@dataclasses.dataclass(frozen=True)
class RowState:
    """The decoding state of one row, on a device or on the host.

    Attributes:
        num_tokens: the number of tokens that were computed.
        page_size: the number of tokens in a page; 0 without pages.
        pages: the pages of each array, [pages, ...], in groups. The last page may be partly used. On a device, groups
            have the sizes of `PAGES_PER_CALL`, and the last one is padded. On the host, there is at most one, without
            padding.
        slot: the slot of each array without pages, [1, ...].
    """

    num_tokens: int
    page_size: int
    pages: tuple[Blocks, ...]
    slot: Blocks

    @property
    def num_pages(self) -> int:
        """The number of pages without padding."""
        return -(-self.num_tokens // self.page_size) if self.page_size else 0

    @property
    def is_on_host(self) -> bool:
        """Whether all arrays are NumPy arrays."""
        return all(isinstance(block, np.ndarray) for block in jax.tree.leaves((self.pages, self.slot)))

    def on_host(self) -> RowState:
        """The same state in NumPy arrays. Waits for the device."""
        if self.is_on_host:
            return self
        groups, slot = jax.device_get((self.pages, self.slot))
        pages: tuple[Blocks, ...] = ()
        if groups:
            pages = ({path: np.concatenate([each[path] for each in groups])[: self.num_pages] for path in groups[0]},)
        return dataclasses.replace(self, pages=pages, slot=slot)


class StateLayout:
    """Which arrays of the decoding state are in pages and which in slots, and what a page and a slot look like.

    Args:
        decoder: the decoder.
        state: its state, or the shapes of it.

    Attributes:
        pages: the shape and dtype of one page of each array, by path.
        slot: those of one slot.
        page_bytes, slot_bytes: bytes of a page and of a slot, in all arrays together.
        page_size: the number of tokens in a page; 0 without pages.
        shardings: where the blocks of each array are: as the array, but not sharded over pages and slots.
    """

    def __init__(self, decoder: Decoder, state: Tree):
        leaves = jax.tree.leaves_with_path(state["model"])
        axes = jax.tree.leaves(decoder.state_axes["model"], is_leaf=lambda axes: isinstance(axes, tuple))
        self.paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
        self.page_axes = {p: a.index("page") for p, a in zip(self.paths, axes, strict=True) if "page" in a}
        self.slot_axes = {p: a.index("batch") for p, a in zip(self.paths, axes, strict=True) if "batch" in a}
        arrays = {path: leaf for path, (_, leaf) in zip(self.paths, leaves, strict=True)}
        self.pages = {path: _without(arrays[path], axis) for path, axis in self.page_axes.items()}
        self.slot = {path: _without(arrays[path], axis) for path, axis in self.slot_axes.items()}
        self.page_bytes, self.slot_bytes = (_num_bytes(blocks) for blocks in (self.pages, self.slot))
        self.page_size = 0 if decoder.paging is None else decoder.paging.page_size
        named = dict(zip(self.paths, axes, strict=True))
        self.shardings = {
            path: _block_sharding(decoder, path, arrays[path], axis, named[path])
            for path, axis in (self.page_axes | self.slot_axes).items()
        }

    def leaves(self, state: Tree) -> dict[str, Array]:
        """The arrays of the state by path."""
        return dict(zip(self.paths, jax.tree.leaves(state["model"]), strict=True))

    def unflattened(self, state: Tree, leaves: Mapping[str, Array]) -> Tree:
        """The state with other arrays."""
        structure = jax.tree.structure(state["model"])
        return state | {"model": jax.tree.unflatten(structure, [leaves[path] for path in self.paths])}

    def check(self, state: RowState) -> None:
        """Checks that a row of another engine fits.

        Raises:
            ConfigError: the page size, the arrays, a shape or a dtype differ, or pages are missing.
        """
        if state.page_size != self.page_size:
            raise ConfigError(
                f"handover: the page size is {state.page_size}, but this engine has {self.page_size}. Use the same "
                f"cache and page_size in both engines"
            )
        for group in state.pages:
            _check_blocks(group, self.pages)
        _check_blocks(state.slot, self.slot)
        found = sum(len(block) for group in state.pages for block in list(group.values())[:1])
        if self.page_size and found < state.num_pages:
            raise ConfigError(
                f"handover: {state.num_tokens} tokens are in {state.num_pages} pages, but only {found} are given. "
                f"Send all pages of the prompt"
            )


def _check_blocks(blocks: Blocks, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises ConfigError unless `blocks` have the paths, shapes and dtypes of `wanted`."""
    if blocks.keys() != wanted.keys():
        differing = ", ".join(sorted(blocks.keys() ^ wanted.keys()))
        raise ConfigError(
            f"handover: the decoding state differs from that of this engine in {differing}. Use the same model and "
            f"caches in both engines"
        )
    for path, block in blocks.items():
        shape, dtype = wanted[path].shape, wanted[path].dtype
        if block.shape[1:] != shape or block.dtype != dtype:
            raise ConfigError(
                f"handover: {path} has {block.dtype}{list(block.shape[1:])}, but this engine {dtype}{list(shape)}. Use "
                f"the same model, dtypes and max_len in both engines"
            )


def _block_sharding(
    decoder: Decoder, path: str, array: Array, axis: int, names: tuple[str | None, ...]
) -> Sharding | None:
    if decoder.layout is None:
        sharding: Sharding | None = getattr(array, "sharding", None)
        return sharding
    block = jax.ShapeDtypeStruct((1, *_without(array, axis).shape), array.dtype)
    names = (None, *names[:axis], *names[axis + 1 :])
    found = state_shardings(decoder.layout, {"model": {path: block}}, {"model": {path: names}})
    sharding = found["model"][path]
    return sharding


def _without(array: Array, axis: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape[:axis] + array.shape[axis + 1 :], array.dtype)


def _num_bytes(blocks: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    return sum(block.size * block.dtype.itemsize for block in blocks.values())


def host_limits(layout: StateLayout, num_bytes: int, *, max_rows: int, offloads_preempted: bool) -> HostLimits:
    """How many pages and slots fit into `num_bytes` of host memory.

    Without pages, all of it is for slots. With both, at most half of it is, for up to 8 times `max_rows` rows.
    """
    if not layout.pages:
        return HostLimits(0, num_bytes // layout.slot_bytes, offloads_preempted)
    num_slots = None
    if layout.slot:
        num_slots = min(8 * max_rows, num_bytes // 2 // layout.slot_bytes)
        num_bytes -= num_slots * layout.slot_bytes
    return HostLimits(num_bytes // layout.page_bytes, num_slots, offloads_preempted)


class StatePrograms:
    """Programs that read and write some pages or one slot of the decoding state. Writing donates the state.

    Args:
        programs: the programs of the engine, which own the state.
        layout: the arrays of the state.

    Attributes:
        layout: the arrays of the state.
        num_traced: the number of programs that were compiled.
        unused: a page that is out of range, so that it is not written.
    """

    def __init__(self, programs: Programs, layout: StateLayout):
        self.layout, self.num_traced = layout, 0
        self._programs = programs
        paging = programs.decoder.paging
        self.unused = 0 if paging is None else paging.num_pages
        self._page_reader = jax.jit(self._trace_page_reader)
        self._page_writer = jax.jit(self._trace_page_writer, donate_argnums=0)
        self._slot_reader = jax.jit(self._trace_slot_reader)
        self._slot_writer = jax.jit(self._trace_slot_writer, donate_argnums=0)

    def read_pages(self, pages: Iterable[int]) -> list[tuple[int, Blocks]]:
        """Pages in groups: how many pages of a group are real, and the group, which is on the device."""
        return [
            (len(group), self._page_reader(self._programs.state, _padded(group, size, group[0])))
            for group, size in self._groups(tuple(pages))
        ]

    def write_pages(self, pages: Iterable[int], blocks: Blocks) -> None:
        """Writes pages of the host, [pages, ...]."""
        start = 0
        for group, size in self._groups(tuple(pages)):
            part = {path: _resized(block, start, len(group), size) for path, block in blocks.items()}
            self.write_group(group, size, part)
            start += len(group)

    def write_group(self, pages: tuple[int, ...], size: int, blocks: Blocks) -> None:
        """Writes a group of `size` pages, on the host or on any devices.

        Those beyond `pages`, and those that are out of range, are dropped.
        """
        at = _padded(pages, size, self.unused)
        self._programs.state = self._page_writer(self._programs.state, at, self._placed(blocks))

    def read_slot(self, slot: int) -> Blocks:
        """The arrays of a slot, [1, ...], on the device."""
        found: Blocks = self._slot_reader(self._programs.state, np.int32(slot)) if self.layout.slot else {}
        return found

    def write_slot(self, slot: int, num_tokens: int, blocks: Blocks) -> None:
        """Writes the arrays of a slot, and the number of its tokens."""
        ints = np.array([slot, num_tokens], np.int32)
        self._programs.state = self._slot_writer(self._programs.state, ints, self._placed(blocks))

    def warm_up(self) -> None:
        """Compiles the programs of every size, without changing the state."""
        for size in PAGES_PER_CALL if self.layout.pages else ():
            self.read_pages([0] * size)
            self.write_pages([self.unused] * size, _zeros(self.layout.pages, size))
        self.read_slot(0)
        self.write_slot(self._programs.decoder.batch_size, 0, _zeros(self.layout.slot, 1))

    def _groups(self, pages: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
        largest = PAGES_PER_CALL[-1]
        for start in range(0, len(pages), largest):
            group = pages[start : start + largest]
            yield group, bucket(PAGES_PER_CALL, len(group))

    def _placed(self, blocks: Blocks) -> Blocks:
        placed: Blocks = jax.device_put(blocks, {path: self.layout.shardings[path] for path in blocks})
        return placed

    def _trace_page_reader(self, state: Tree, pages: Array) -> Blocks:
        self.num_traced += 1
        leaves = self.layout.leaves(state)
        return {
            path: jnp.moveaxis(jnp.take(leaves[path], pages, axis=axis, mode="clip"), axis, 0)
            for path, axis in self.layout.page_axes.items()
        }

    def _trace_page_writer(self, state: Tree, pages: Array, blocks: Blocks) -> Tree:
        self.num_traced += 1
        leaves = self.layout.leaves(state)
        for path, axis in self.layout.page_axes.items():
            leaves[path] = _put(leaves[path], axis, pages, blocks[path])
        return self.layout.unflattened(state, leaves)

    def _trace_slot_reader(self, state: Tree, slot: Array) -> Blocks:
        self.num_traced += 1
        leaves = self.layout.leaves(state)
        return {
            path: jnp.moveaxis(jax.lax.dynamic_slice_in_dim(leaves[path], slot, 1, axis), axis, 0)
            for path, axis in self.layout.slot_axes.items()
        }

    def _trace_slot_writer(self, state: Tree, ints: Array, blocks: Blocks) -> Tree:
        self.num_traced += 1
        slot, num_tokens = ints[:1], ints[1:]
        leaves = self.layout.leaves(state)
        for path, axis in self.layout.slot_axes.items():
            leaves[path] = _put(leaves[path], axis, slot, blocks[path])
        return self.layout.unflattened(state, leaves) | {
            "lengths": state["lengths"].at[slot].set(num_tokens, mode="drop")
        }


def _put(array: Array, axis: int, at: Array, block: Array | np.ndarray) -> Array:
    """Writes `block`, whose first axis is `axis` of the array. Indices out of range are dropped."""
    return array.at[(slice(None),) * axis + (at,)].set(jnp.moveaxis(block, 0, axis), mode="drop")


def _padded(pages: tuple[int, ...], size: int, padding: int) -> np.ndarray:
    return np.array([*pages, *[padding] * (size - len(pages))], np.int32)


def _resized(block: Array | np.ndarray, start: int, count: int, size: int) -> np.ndarray:
    """`count` pages from `start`, and padding."""
    part = np.asarray(block[start : start + count])
    return part if count == size else np.concatenate([part, np.zeros((size - count, *part.shape[1:]), part.dtype)])


def _zeros(blocks: Mapping[str, jax.ShapeDtypeStruct], count: int) -> Blocks:
    return {path: np.zeros((count, *block.shape), block.dtype) for path, block in blocks.items()}


def _empty(blocks: Mapping[str, jax.ShapeDtypeStruct], count: int | None) -> dict[str, np.ndarray]:
    return {path: np.empty((count, *block.shape), block.dtype) for path, block in blocks.items()} if count else {}


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
        programs: the programs of the engine.
        layout: the arrays of the state.
        limits: the size of host memory.

    Attributes:
        programs: the programs that read and write the state.
        bytes_to_host, bytes_to_device: what was copied so far, without padding.
        exported: the state of exported sequences, by id, until it is taken.
    """

    def __init__(self, programs: Programs, layout: StateLayout, limits: HostLimits):
        self.programs = StatePrograms(programs, layout)
        self.exported: dict[int, RowState] = {}
        # Allocated once. The system commits the memory on first use.
        self._host_pages, self._host_slots = (
            _empty(layout.pages, limits.num_pages),
            _empty(layout.slot, limits.num_slots),
        )
        self._copies: deque[_Copy] = deque()
        self._plan = self.bytes_to_host = self.bytes_to_device = 0

    def start(self, transfers: Iterable[Transfer], plan: int) -> None:
        """Runs the transfers of a plan in their order. Only those that read host memory may wait for the device."""
        self._plan = plan
        run = {"offload": self._offload, "restore": self._restore, "export": self._export, "import": self._import}
        for transfer in transfers:
            run[transfer.kind](transfer)

    def finish(self, plan: int) -> None:
        """Waits for the copies to the host of this plan and of those before it."""
        while self._copies and self._copies[0].plan <= plan:
            copy = self._copies.popleft()
            blocks = jax.device_get(copy.blocks)
            for path, block in blocks.items():
                copy.target[path][list(copy.at)] = block[: len(copy.at)]

    def _offload(self, transfer: Transfer) -> None:
        layout, at = self.programs.layout, 0
        for count, blocks in self.programs.read_pages(transfer.pages):
            self._copy(self._host_pages, transfer.host_pages[at : at + count], blocks)
            self.bytes_to_host += count * layout.page_bytes
            at += count
        if transfer.host_slot is not None and layout.slot:
            assert transfer.slot is not None
            self._copy(self._host_slots, (transfer.host_slot,), self.programs.read_slot(transfer.slot))
            self.bytes_to_host += layout.slot_bytes

    def _copy(self, target: dict[str, np.ndarray], at: tuple[int, ...], blocks: Blocks) -> None:
        for block in blocks.values():
            assert isinstance(block, jax.Array)
            block.copy_to_host_async()
        self._copies.append(_Copy(self._plan, target, at, blocks))

    def _restore(self, transfer: Transfer) -> None:
        self.finish(self._plan)
        self.programs.write_pages(transfer.pages, _taken(self._host_pages, transfer.host_pages))
        self.bytes_to_device += len(transfer.pages) * self.programs.layout.page_bytes
        if transfer.slot is not None:
            slot = {} if transfer.host_slot is None else _taken(self._host_slots, (transfer.host_slot,))
            self._write_slot(transfer, slot)

    def _import(self, transfer: Transfer) -> None:
        state = transfer.handover
        assert isinstance(state, RowState)
        first = transfer.first_page
        if state.is_on_host:
            for group in state.pages:
                self.programs.write_pages(transfer.pages, {path: block[first:] for path, block in group.items()})
        else:
            pages, start = (*[self.programs.unused] * first, *transfer.pages), 0
            for group in state.pages:
                size = len(next(iter(group.values())))
                self.programs.write_group(pages[start : start + size], size, group)
                start += size
        self.bytes_to_device += len(transfer.pages) * self.programs.layout.page_bytes
        self._write_slot(transfer, state.slot)

    def _write_slot(self, transfer: Transfer, blocks: Blocks) -> None:
        assert transfer.slot is not None
        self.programs.write_slot(transfer.slot, transfer.num_tokens, blocks)
        self.bytes_to_device += self.programs.layout.slot_bytes

    def _export(self, transfer: Transfer) -> None:
        layout = self.programs.layout
        assert transfer.sequence is not None and transfer.slot is not None
        pages = tuple(blocks for _, blocks in self.programs.read_pages(transfer.pages))
        slot = self.programs.read_slot(transfer.slot)
        self.exported[transfer.sequence.id] = RowState(transfer.num_tokens, layout.page_size, pages, slot)


def _taken(arrays: Mapping[str, np.ndarray], at: tuple[int, ...]) -> Blocks:
    """New arrays, since JAX on CPU may read NumPy memory after a call returns."""
    return {path: array[list(at)] for path, array in arrays.items()} if at else {}
