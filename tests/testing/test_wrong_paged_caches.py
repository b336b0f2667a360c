"""`PagedCacheSuite` fails for paged caches that are wrong in one way, and passes for a correct one."""

import dataclasses

import jax.numpy as jnp
import pytest

from axcore.module import DecodingState
from axcore.nn import Paged
from axcore.nn.kv.codes import encoded
from axcore.testing import PagedCacheSuite
from axcore_paged_kv.cache import PagedCache

from .wrong import instance, names


class Cache(PagedCache):
    """A paged cache whose steps subclasses replace."""

    def __call__(self, inputs):
        paging, rows = self.config.paging, self.rows(inputs)
        size = min(self.config.max_len, rows.pages.shape[1] * paging.page_size)
        self.store(self.where(inputs, size), inputs.plain)
        k, v, layer, scales, read_as = self.arrays
        tokens = rows.tokens.part(0, size)
        return inputs.replace(kv=self.view(k, v, rows.pages, tokens, rows.lengths, layer, scales, read_as))

    view = Paged

    def where(self, inputs, size):
        """(page, token in the page)."""
        paging, table = self.config.paging, self.rows(inputs).pages
        _, place = self.places(inputs, size)
        column = jnp.minimum(place, size - 1) // paging.page_size
        page = jnp.where(place < size, jnp.take_along_axis(table, column, axis=1), paging.num_pages)
        return page, place % paging.page_size

    def store(self, at, kv):
        self.write(at, kv)


class Wraps(Cache):
    """Writes without a page go to page -1, which JAX counts from the end."""

    def store(self, at, kv):
        page = jnp.where(at[0] == self.config.paging.num_pages, -1, at[0])
        for state, x in ((self.keys, kv.k), (self.values, kv.v)):
            state.set_raw_value(state.whole.at[(*state.layer, page, at[1])].set(x, mode="drop"))


class NextPage(Cache):
    """The last token of a page goes to the next page of the row."""

    def where(self, inputs, size):
        table, page_size = self.rows(inputs).pages, self.config.page_size
        page, offset = super().where(inputs, size)
        _, place = self.places(inputs, size)
        column = jnp.minimum((place + 1) // page_size, table.shape[1] - 1)
        return jnp.where(page < self.config.paging.num_pages, jnp.take_along_axis(table, column, axis=1), page), offset


class StaleScale(Cache):
    """Keeps the scale of a place that already has one, as of an earlier row that had the page."""

    def store(self, at, kv):
        for state, scale, x in ((self.keys, self.keys_scale, kv.k), (self.values, self.values_scale, kv.v)):
            codes, scales = encoded(x, "int8")
            state.put(at, codes)
            old = scale.whole.at[(*scale.layer, *at)].get(mode="clip")
            scale.put(at, jnp.where(old == 0, scales, old))


class StoresPadding(Cache):
    def where(self, inputs, size):
        return super().where(inputs.replace(query=dataclasses.replace(inputs.query, valid=None)), size)


class OwnPages(Cache):
    """Writes to the pages that a slot has without a table."""

    def where(self, inputs, size):
        slots, place = self.places(inputs, size)
        page, offset = super().where(inputs, size)
        own = slots * self.config.paging.pages_for(size) + place // self.config.page_size
        return jnp.where(page < self.config.paging.num_pages, own, page), offset


class ReadsAll(Cache):
    """Reads what the pages contain after the last token of a row. A mask does not hide NaN in values."""

    @staticmethod
    def view(k, v, table, tokens, lengths, *more):
        return Paged(k, v, table, tokens, jnp.full_like(lengths, 1000), *more)


class FirstLayer(Cache):
    """Reads the pages of the first layer of a scanned stack."""

    @staticmethod
    def view(k, v, table, tokens, lengths, layer, *codes):
        return Paged(k, v, table, tokens, lengths, tuple(0 * each for each in layer), *codes)


class BatchAxis(Cache):
    """Its state does not say that it is in pages."""

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        for name in ("keys", "values"):
            setattr(self, name, DecodingState(getattr(self, name).whole, axes=(None, None, "kv_head", None)))


def suite(cache, **options):
    options = {"page_size": 4} | options
    return instance(PagedCacheSuite, name="paged-kv", exact=0.05 if "dtype" in options else 2e-5,
                    _cache=lambda self: cache.Config(**options))  # fmt: skip


CHECKS = {
    "order": "test_pages_may_be_in_any_order",
    "places": "test_only_places_of_tokens_change",
    "pool": "test_the_decoder_knows_the_pool",
    "scan": "test_a_scanned_stack_reads_its_own_pages",
    "sharing": "test_rows_may_share_the_pages_of_a_prefix",
    "used again": "test_a_page_can_be_used_again",
}
WRONG = {
    "batch axis, sharing": (suite(BatchAxis), "sharing"),
    "first layer": (suite(FirstLayer), "scan"),
    "next page": (suite(NextPage), "order"),
    "own pages, order": (suite(OwnPages), "order"),
    "own pages, sharing": (suite(OwnPages), "sharing"),
    "reads all": (suite(ReadsAll), "order"),
    "stale scale": (suite(StaleScale, dtype="int8"), "used again"),
    "stores padding": (suite(StoresPadding), "places"),
    "wraps": (suite(Wraps), "places"),
}
LONG = ("next page", "stale scale", "stores padding", "wraps")


@pytest.mark.parametrize("name", names(WRONG, LONG))
def test_case_a_wrong_paged_cache_fails(name):
    wrong, check = WRONG[name]
    with pytest.raises(AssertionError):
        getattr(wrong, CHECKS[check])()


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("options", [{}, {"dtype": "int8"}], ids=["plain", "int8"])
def test_case_a_correct_paged_cache_passes(check, options):
    getattr(suite(Cache, **options), CHECKS[check])()
