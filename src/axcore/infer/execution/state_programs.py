"""Programs that read and write decoding state: pages of paged caches, and slots of other caches and layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from axcore.config import allocating
from axcore.infer.execution.buckets import bucket
from axcore.infer.execution.programs import Programs
from axcore.infer.execution.row_state import Blocks, StateLayout
from axcore.module import Tree

PAGES_PER_CALL = (1, 4, 16)
"""The numbers of pages for which programs are compiled. Other numbers take several calls, the last of them padded."""


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

    def empty_slots(self, count: int) -> list[Blocks]:
        """The arrays of some slots, [1, ...] each, with zeros.

        Raises:
            OutOfMemory: they do not fit in memory.
        """
        what = f"engine.prefix_states={count}, states of {self.layout.slot_bytes} bytes each"
        with allocating(what, "Reduce engine.prefix_states"):
            return [
                {
                    path: jnp.zeros((1, *block.shape), block.dtype, device=self.layout.shardings[path])
                    for path, block in self.layout.slot.items()
                }
                for _ in range(count)
            ]

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
