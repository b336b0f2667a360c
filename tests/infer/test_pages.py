"""Page pools: reference counts, keys of prefixes, eviction."""

import itertools

import pytest
from hypothesis import given, strategies as st

from axcore.config import ConfigError
from axcore.infer.scheduling.pages import PagePool


def keys_of(pool, tokens, *, salt="", adapter=None):
    keys = []
    pool.extend(keys, tokens, salt=salt, adapter=adapter)
    return keys


def publish(pool, tokens):
    """Allocates and publishes the full pages of a row."""
    keys = keys_of(pool, tokens)
    pages = pool.allocate(len(keys))
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key)
    return pages


@pytest.mark.parametrize("name", ["num_pages", "page_size"])
def test_empty_pools_are_refused(name):
    with pytest.raises(ConfigError, match=f"PagePool.{name} must be at least 1, not 0"):
        PagePool(**{"num_pages": 4, "page_size": 4} | {name: 0})


def test_wrong_use_is_noticed():
    pool = PagePool(4, 2)
    pages = pool.allocate(2)
    with pytest.raises(AssertionError, match="3 pages requested, 2 available"):
        pool.allocate(3)
    pool.publish(pages[0], b"key")
    with pytest.raises(AssertionError, match="published twice"):
        pool.publish(pages[0], b"other key")
    pool.release(pages)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(pages)
    with pytest.raises(AssertionError, match="belongs to no row"):
        pool.publish(pages[1], b"third key")


def test_a_page_is_live_until_its_last_row_releases_it():
    pool = PagePool(4, 2)
    pages = publish(pool, [1, 2, 3, 4])
    pool.retain(pages)
    pool.release(pages)
    assert pool.usage == (2, 0, 2)
    pool.release(pages)
    assert pool.usage == (0, 2, 2)
    pool.retain(pages[:1])
    assert pool.usage == (1, 1, 2)


def test_pages_without_a_key_are_free_at_once():
    pool = PagePool(4, 2)
    pool.release(pool.allocate(3))
    assert pool.usage == (0, 0, 4)


def test_the_least_recently_used_pages_are_evicted_and_tails_before_heads():
    pool = PagePool(6, 2)
    rows = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
    for row in rows:
        pool.release(publish(pool, row))
    first, second = (keys_of(pool, row) for row in rows)
    found = []
    for _ in range(6):
        found.append((len(pool.match(first)), len(pool.match(second))))
        pool.allocate(1)
    assert found == [(3, 3), (2, 3), (1, 3), (0, 3), (0, 2), (0, 1)]
    assert pool.match(second) == [] and pool.usage == (6, 0, 0)


def test_a_hit_makes_pages_recently_used():
    pool = PagePool(2, 2)
    for row in ([1, 2], [3, 4]):
        pool.release(publish(pool, row))
    hit = pool.match(keys_of(pool, [1, 2]))
    pool.retain(hit)
    pool.release(hit)
    pool.allocate(1)
    assert pool.match(keys_of(pool, [1, 2])) and not pool.match(keys_of(pool, [3, 4]))


def test_a_duplicate_stays_private_to_its_row():
    pool = PagePool(6, 2)
    tokens = [1, 2, 3, 4]
    first = publish(pool, tokens)
    second = publish(pool, tokens)
    assert pool.match(keys_of(pool, tokens)) == first
    pool.release(second)
    assert pool.usage == (2, 0, 4)
    pool.release(first)
    assert pool.usage == (0, 2, 4)


def test_flush_forgets_content_but_not_owners():
    pool = PagePool(6, 2)
    live, cached = publish(pool, [1, 2]), publish(pool, [3, 4])
    pool.release(cached)
    old = keys_of(pool, [1, 2])
    pool.flush()
    assert pool.usage == (1, 0, 5) and pool.epoch == 1
    assert not pool.match(old) and not set(old) & set(keys_of(pool, [1, 2]))
    pool.release(live)
    assert pool.usage == (0, 0, 6)


def test_only_full_pages_have_keys_and_more_tokens_append_to_them():
    pool = PagePool(4, 3)
    keys = keys_of(pool, [1, 2])
    assert keys == []
    for tokens in ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]):
        pool.extend(keys, tokens, salt="", adapter=None)
        assert keys == keys_of(pool, tokens) and len(keys) == len(tokens) // 3
    assert all(len(key) >= 16 for key in keys)


def test_a_pool_that_shares_nothing_has_no_keys():
    assert keys_of(PagePool(4, 2, shares_prefixes=False), [1, 2, 3, 4]) == []


names = st.sampled_from(["", "a", "b", "None", "a', 'b", "('a', None, 0)"])
rows = st.tuples(names, st.none() | names, st.integers(0, 2), st.lists(st.integers(0, 2), min_size=4, max_size=4))


@given(rows, rows)
def test_keys_are_equal_only_if_everything_that_they_stand_for_is(first, second):
    keys = []
    for salt, adapter, num_flushed, tokens in (first, second):
        pool = PagePool(2, 2)
        for _ in range(num_flushed):
            pool.flush()
        keys.append(keys_of(pool, tokens, salt=salt, adapter=adapter))
    for end, pair in enumerate(zip(*keys, strict=True), 1):
        same = first[:3] == second[:3] and first[3][: 2 * end] == second[3][: 2 * end]
        assert (pair[0] == pair[1]) == same


def test_each_part_of_a_key_alone_makes_a_difference():
    plain, flushed = PagePool(2, 2), PagePool(2, 2)
    flushed.flush()
    keys = [
        keys_of(plain, [1, 2]),
        keys_of(plain, [1, 3]),
        keys_of(plain, [1, 2], salt="a"),
        keys_of(plain, [1, 2], salt="\udc80"),
        keys_of(plain, [1, 2], adapter="a"),
        keys_of(plain, [1, 2], adapter=""),
        keys_of(plain, [1, 2], adapter="None"),
        keys_of(flushed, [1, 2]),
        keys_of(plain, [2**32 + 1, 2]),
    ]
    assert all(left != right for left, right in itertools.combinations(keys, 2))
