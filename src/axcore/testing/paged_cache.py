"""The conformance suite of a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from axcore.infer import Decoder, Step
from axcore.module import Tree
from axcore.nn import Paging
from axcore.testing.kv_cache import LENGTH, KVCacheSuite, logical_axes, tokens
from axcore.testing.models import VOCAB_SIZE

MARK = 113
"""The number in places of integer arrays that no row owns. Floating-point arrays have NaN there."""


class PagedCacheSuite(KVCacheSuite):
    """Checks that decoding from pages equals full recomputation, and that a step changes only the places of its tokens.

    ```python
    class TestPages(PagedCacheSuite):
        name = "pages"
        options = {"page_size": 4}
    ```

    Set a `page_size` from 2 to 4 in `options`, and at least `2 * ceil(max_len / page_size)` pages. For other attributes
    see `KVCacheSuite`. In the checks with page tables, the pool is full of NaN before the first step.
    """

    row_axis: ClassVar[str] = "page"

    def test_the_decoder_knows_the_pool(self) -> None:
        decoder, _, state = self._abstract()
        paging = decoder.paging
        assert paging is not None, "the Config must have a property paging that returns the Paging of the pool"
        assert 2 <= paging.page_size <= 4, "set options so that page_size is from 2 to 4"
        assert paging.num_pages >= 2 * paging.pages_for(self.max_len), "the checks require pages for two whole rows"
        axes = logical_axes(decoder.state_axes["model"])
        for path, array in _by_path(state["model"]).items():
            if "page" in axes[path]:
                at = axes[path].index("page")
                found = array.shape[at : at + 2]
                assert found == (paging.num_pages, paging.page_size), (
                    f"{path} must have the dimensions (page, token in the page) = {paging}, not {found}"
                )

    def test_pages_may_be_in_any_order(self) -> None:
        """Steps end one token before a page ends, at its end, and one token after it."""
        size, expected = self._paging().page_size, self._recomputed(self.max_len)
        for seed, first in enumerate((size - 1, size, size + 1)):
            tables = self._tables(seed)
            found, _ = self._run(tables, (first, size, 1, self.max_len - first - size - 1))
            self._check(found, expected, f"first a step of {first} tokens, with pages {tables.tolist()}")

    def test_only_places_of_tokens_change(self) -> None:
        """Row 1 has padding, table entries after the last token are unused, and a third row has no tokens."""
        size, expected, ids = self._paging().page_size, self._recomputed(self.max_len), tokens(self.max_len)
        whole, width = np.asarray(self._tables(3)), size + 2
        step, params, empty = self._decoder()
        for unused in (self._paging().num_pages, -1):
            state, start = self._spoiled(empty), np.zeros(2, np.int32)
            for lengths in ([width, size], [1, 2]):
                end = start + np.asarray(lengths, np.int32)
                is_unused = np.arange(whole.shape[1]) * size >= end[:, None]
                table = np.where(is_unused, unused, whole)
                three = Step(
                    jnp.stack([ids[row, start[row] : start[row] + width] for row in (0, 1, 1)]),
                    jnp.asarray([*start, 0]),
                    lengths=jnp.asarray([*lengths, 0]),
                    slots=jnp.asarray([1, 0, 2]),  # slot 2 does not exist
                    pages=jnp.asarray([*table, np.full_like(table[0], unused)]),
                )
                logits, state = step(params, state, three)
                for row, count in enumerate(lengths):
                    wanted = expected[row : row + 1, start[row] : end[row]]
                    self._check(logits[row : row + 1, :count], wanted, start=int(start[row]))
                owned = {(int(whole[row, at // size]), at % size) for row in range(2) for at in range(end[row])}
                self._check_owned(state, owned, f"unused entries {unused}")
                start = end

    def test_rows_may_share_the_pages_of_a_prefix(self) -> None:
        """Row 1 begins with the tokens of row 0. It starts after them, in pages that row 0 filled."""
        decoder = self._abstract()[0]
        assert decoder.shares_prefixes, "every DecodingState of a paged cache must have the logical axis page"
        size, length = self._paging().page_size, self.max_len
        ids = tokens(length)
        ids = ids.at[1, :size].set(ids[0, :size])
        expected, tables = self._recomputed(length, ids=ids), self._tables(4)
        tables = tables.at[1, 0].set(tables[0, 0])
        step, params, state = self._decoder()
        state = self._spoiled(state)
        alone = Step(ids[:1, : size + 1], jnp.zeros(1, jnp.int32), slots=jnp.asarray([0]), pages=tables[:1])
        logits, state = step(params, state, alone)
        self._check(logits, expected[:1, : size + 1])
        hit = Step(ids[1:, size : size + 2], jnp.asarray([size]), slots=jnp.asarray([1]), pages=tables[1:])
        logits, state = step(params, state, hit)
        self._check(logits, expected[1:, size : size + 2], start=size)
        rows = jnp.stack([ids[0, size + 1 : size + 3], ids[1, size + 2 : size + 4]])
        both = Step(rows, jnp.asarray([size + 1, size + 2]), pages=tables)
        logits, _ = step(params, state, both)
        wanted = np.stack([expected[0, size + 1 : size + 3], expected[1, size + 2 : size + 4]])
        self._check(logits, wanted, start=[[size + 1], [size + 2]])

    def test_parts_of_a_prompt_may_be_rows_of_one_step(self) -> None:
        """Two parts of row 0, in any order, beside a part of row 1."""
        ids, expected, tables = tokens(), self._recomputed(), self._tables(7)
        for order in ((0, 1), (1, 0)):
            step, params, state = self._decoder()
            state = self._spoiled(state)
            width = 4
            parts = [(0, 0, 3), (0, 3, 4)]
            rows = [parts[each] for each in order] + [(1, 0, 2)]
            block = Step(
                jnp.stack([jnp.pad(ids[row, at : at + count], (0, width - count)) for row, at, count in rows]),
                jnp.asarray([at for _, at, _ in rows]),
                lengths=jnp.asarray([count for *_, count in rows]),
                slots=jnp.asarray([row for row, *_ in rows]),
                pages=jnp.stack([tables[row] for row, *_ in rows]),
            )
            logits, state = step(params, state, block)
            for found, (row, at, count) in zip(logits, rows, strict=True):
                self._check(found[None, :count], expected[row : row + 1, at : at + count], f"part {at}", start=at)
            assert state["lengths"].tolist() == [LENGTH, 2]

    def test_a_page_can_be_used_again(self) -> None:
        """Rows get each other's pages, in another order, after these held much larger keys and values."""
        size = self._paging().page_size
        tables = self._tables(5)
        step, params, state = self._decoder()
        state = jax.tree.map(lambda x: x + jnp.asarray(100).astype(x.dtype), state)
        state = state | {"lengths": jnp.zeros_like(state["lengths"])}
        wrong = (tokens(self.max_len) + 1) % VOCAB_SIZE
        _, state = step(params, state, Step(wrong[:, : size + 1], jnp.zeros(2, jnp.int32), pages=tables))
        found, _ = self._run(tables[::-1, ::-1], (size + 1, size), state=state)
        self._check(found, self._recomputed(self.max_len)[:, : 2 * size + 1])

    def test_a_scanned_stack_reads_its_own_pages(self) -> None:
        size, tables = self._paging().page_size, self._tables(6)
        found, _ = self._run(tables, (size, 1), unstack=False)
        self._check(found, self._recomputed(self.max_len)[:, : size + 1])

    def _run(
        self, tables: jax.Array, sizes: Sequence[int], state: Tree | None = None, unstack: bool = True
    ) -> tuple[np.ndarray, Tree]:
        """The logits of two rows in steps of these sizes, and the state after them."""
        step, params, empty = self._decoder(unstack=unstack)
        state = self._spoiled(empty) if state is None else state
        logits, start, ids = [], 0, tokens(self.max_len)
        for size in sizes:
            part = Step(ids[:, start : start + size], jnp.full((2,), start, jnp.int32), pages=tables)
            each, state = step(params, state, part)
            logits.append(each)
            start += size
        return np.concatenate(logits, axis=1), state

    def _abstract(self) -> tuple[Decoder, Tree, Tree]:
        return Decoder.abstract(self.model(), cache=self._cache(), batch_size=2, max_len=self.max_len)

    def _paging(self) -> Paging:
        paging = self._abstract()[0].paging
        assert paging is not None
        return paging

    def _tables(self, seed: int) -> jax.Array:
        """Two page tables with pages in random order."""
        paging = self._paging()
        pages = np.random.default_rng(seed).permutation(paging.num_pages)
        return jnp.asarray(pages[: 2 * paging.pages_for(self.max_len)].reshape(2, -1), jnp.int32)

    def _spoiled(self, state: Tree) -> Tree:
        """The state with a pool full of NaN, or of `MARK` in integer arrays."""

        def spoil(x: jax.Array) -> jax.Array:
            return jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else MARK)

        return state | {"model": jax.tree.map(spoil, state["model"])}

    def _check_owned(self, state: Tree, owned: set[tuple[int, int]], message: str) -> None:
        """Checks that exactly the places (page, token in the page) in `owned` have been written."""
        paging, axes = self._paging(), logical_axes(self._abstract()[0].state_axes["model"])
        kept = np.full((paging.num_pages, paging.page_size), True)
        kept[tuple(zip(*owned, strict=True))] = False
        for path, array in _by_path(state["model"]).items():
            at = axes[path].index("page")
            x = np.moveaxis(np.asarray(array).astype(np.float32), (at, at + 1), (0, 1))
            x = x.reshape(*x.shape[:2], -1)
            old = np.isnan(x) if jnp.issubdtype(array.dtype, jnp.floating) else x == MARK
            assert old[kept].all(), f"{message}: {path} changed in places without a token: {_places(kept, ~old)}"
            if jnp.issubdtype(array.dtype, jnp.floating):
                assert not old[~kept].any(), f"{message}: {path} is not written at {_places(~kept, old)}"


def _places(chosen: np.ndarray, wrong: np.ndarray) -> list[list[int]]:
    """The chosen places (page, token in the page) where any number is wrong."""
    found: list[list[int]] = np.argwhere(chosen & wrong.any(-1)).tolist()
    return found


def _by_path(tree: Tree) -> dict[str, jax.Array]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
