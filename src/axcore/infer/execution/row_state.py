"""The decoding state of one row outside of the caches, and which arrays of the state it comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Shaped

from axcore.config import ConfigError
from axcore.infer.decoding.decoder import Decoder
from axcore.infer.decoding.model import state_shardings
from axcore.infer.scheduling.host_pool import HostLimits
from axcore.module import Tree

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
    of_block: Sharding = found["model"][path]
    return of_block


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
