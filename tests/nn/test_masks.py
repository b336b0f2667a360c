"""Masks against loops over (query, key)."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from axcore.config import AxcoreError
from axcore.nn import And, Causal, Full, Or, Prefix, SameSegment, SlidingWindow, TokenInfo

BATCH, SEQ, KV_SEQ = 2, 4, 6
QUERY = TokenInfo(
    index=np.array([[2, 3, 4, 5]], np.int32),
    positions=np.array([[0, 1, 2, 3]], np.int32),
    segment_ids=np.array([[0, 1, 1, 1], [0, 0, 0, 2]], np.int32),
)
KEY = TokenInfo(
    index=np.arange(KV_SEQ, dtype=np.int32)[None],
    positions=np.arange(KV_SEQ, dtype=np.int32)[None],
    segment_ids=np.array([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 2]], np.int32),
)


def by_loops(rule, query=QUERY, key=KEY):
    """rule(query index, key index, query segment, key segment) for each pair."""
    out = np.zeros((BATCH, SEQ, KV_SEQ), bool)
    for b in range(BATCH):
        for i in range(SEQ):
            for t in range(KV_SEQ):
                segments = (query.segment_ids[b, i], key.segment_ids[b, t]) if query.segment_ids is not None else (0, 0)
                out[b, i, t] = rule(query.index[0, i], key.index[0, t], *segments)
    return out


RULES = [
    (Full(), lambda i, t, a, b: True),
    (Causal(), lambda i, t, a, b: t <= i),
    (SlidingWindow(size=1), lambda i, t, a, b: t == i),
    (SlidingWindow(size=2), lambda i, t, a, b: -2 < t - i < 2),
    (SlidingWindow(size=99), lambda i, t, a, b: True),
    (SameSegment(), lambda i, t, a, b: a == b),
    (Causal() | Prefix(size=5), lambda i, t, a, b: t <= i or t < 5),
]


def same(mask, rule, query=QUERY, key=KEY):
    found = np.broadcast_to(np.asarray(mask.allowed(query, key)), (BATCH, SEQ, KV_SEQ))
    assert found.dtype == bool
    np.testing.assert_array_equal(found, by_loops(rule, query, key))


@pytest.mark.parametrize(("mask", "rule"), RULES, ids=lambda value: repr(value) if not callable(value) else "")
def test_a_mask_follows_its_rule(mask, rule):
    same(mask, rule)


def test_prefix_requires_one_position_for_each_token():
    key = TokenInfo(KEY.index, np.zeros((1, KV_SEQ, 3), np.int32))
    with pytest.raises(AxcoreError, match="one position for each token"):
        Prefix(size=2).allowed(QUERY, key)


def test_rows_without_segment_ids_are_one_segment():
    query, key = TokenInfo(QUERY.index, QUERY.positions), TokenInfo(KEY.index, KEY.positions)
    same(SameSegment(), lambda i, t, a, b: True, query, key)
    same(Causal() & SameSegment(), lambda i, t, a, b: t <= i, query, key)


def test_a_causal_window_contains_the_last_tokens():
    same(Causal() & SlidingWindow(size=3), lambda i, t, a, b: i - 3 < t <= i)


def combined(parts):
    operator, (one, first), (two, second) = parts
    if operator == "&":
        return one & two, lambda *pair: first(*pair) and second(*pair)
    return one | two, lambda *pair: first(*pair) or second(*pair)


rules = st.recursive(
    st.sampled_from(RULES),
    lambda below: st.tuples(st.sampled_from("&|"), below, below).map(combined),
    max_leaves=4,
)


@settings(max_examples=15)
@given(rules)
def test_combined_masks_follow_the_combined_rules(pair):
    same(*pair)


def test_combinations_are_flat_for_every_grouping():
    one, two, three = Causal(), SameSegment(), SlidingWindow(size=2)
    assert (one & two) & three == one & (two & three) == And(masks=(one, two, three))
    assert (one | two) | three == one | (two | three) == Or(masks=(one, two, three))
    assert (one & two) | three == Or(masks=(And(masks=(one, two)), three))


def test_combined_masks_are_config_values():
    mask = Causal() & SlidingWindow(size=2)
    assert hash(mask) == hash(Causal() & SlidingWindow(size=2))
    assert "masks.1.size: 2" in mask.text()


@pytest.mark.parametrize("size", [0, -1])
def test_an_empty_window_raises(size):
    with pytest.raises(AxcoreError, match="size"):
        SlidingWindow(size=size)


def test_token_info_counts_rows_from_zero_and_keeps_packed_positions():
    ids = np.zeros((2, 3), np.int32)
    plain = TokenInfo.of(ids)
    np.testing.assert_array_equal(plain.index, [[0, 1, 2]])
    np.testing.assert_array_equal(plain.positions, plain.index)
    assert plain.segment_ids is None
    positions = np.array([[0, 0, 1], [0, 1, 0]])
    packed = TokenInfo.of(ids, positions, positions)
    np.testing.assert_array_equal(packed.index, [[0, 1, 2]])
    assert packed.positions is positions


@pytest.mark.parametrize("kind", [And, Or])
def test_case_a_combination_of_no_masks_is_refused(kind):
    with pytest.raises(AxcoreError, match=rf"{kind.__name__}\.masks must contain at least one mask\. Use Full\(\)"):
        kind(masks=())
