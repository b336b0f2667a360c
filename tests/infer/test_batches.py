"""Chunks of a step packed into the rows of calls, without a model."""

import types

import numpy as np
import pytest

from axcore.infer import Request
from axcore.infer.execution.batches import Packer
from axcore.infer.execution.buckets import Buckets
from axcore.infer.loaded_adapters import LoadedAdapter
from axcore.infer.sequences import Chunk, Sequence
from axcore.nn import Paging

MAX_LEN, ROWS, PAGE = 64, 4, 8


def packer(*, paged, tables=1):
    """Packs for a decoder of four rows. Prompts have parts of 16 tokens with pages, and otherwise rows of their own."""
    paging = Paging(num_pages=32, page_size=PAGE) if paged else None
    decoder = types.SimpleNamespace(batch_size=ROWS, paging=paging)
    pages = MAX_LEN // PAGE if paged else None
    return Packer(decoder, Buckets.of(ROWS, 32, MAX_LEN, pages, tables, has_parts=paged))


def chunk(slot, start, count, *, is_last=True, is_known=True, num_drafts=0, adapter=None):
    sequence = Sequence(slot, Request(tuple(range(100, 100 + start + count))))
    sequence.slot, sequence.pages = slot, list(range(8 * slot, 8 * slot + -(-(start + count) // PAGE)))
    sequence.adapter = adapter
    ids = sequence.tokens[start:] if is_known else ()
    return Chunk(sequence, start, count, is_last, tuple(ids), num_drafts)


def test_rows_that_decode_follow_each_other_with_pages_and_have_their_slots_without():
    decode = [chunk(2, 9, 1), chunk(0, 4, 1, is_known=False)]
    call, rows, number = packer(paged=True).call(decode, [])
    assert number == 0 and call.prefill is None and call.at is None
    assert rows == {0: decode[0], 1: decode[1]}
    assert call.decode.ids[:, 0].tolist() == [109, 0, 0, 0]
    assert call.decode.scalars.tolist() == [[9, 1, 2, 0, -1], [4, 1, 0, 1, -1], *[[0, 0, ROWS, 0, -1]] * 2]
    assert call.decode.pages[0].tolist() == [16, 17, *[32] * 6]
    call, rows, _ = packer(paged=False).call(decode, [])
    assert rows == {2: decode[0], 0: decode[1]} and not call.decode.pages.size
    assert call.decode.scalars[:, 1].tolist() == [1, 0, 1, 0]


def test_a_prompt_is_divided_into_parts_and_samples_after_the_last():
    prompts = [chunk(1, 0, 20), chunk(3, 0, 8, is_last=False)]
    call, rows, number = packer(paged=True).call([], prompts[:1])
    assert number == 1 and call.decode is None
    width = call.prefill.ids.shape[1]
    parts = call.prefill.scalars[call.prefill.scalars[:, 1] > 0]
    assert parts[:, 0].tolist() == list(range(0, 20, width)) and parts[:, 1].sum() == 20
    assert rows == {len(parts) - 1: prompts[0]}
    assert call.prefill.ids[call.prefill.ids > 0].tolist() == list(range(100, 120))
    call, rows, number = packer(paged=True).call([], prompts[1:])
    assert rows == {}, "a chunk that is not the last samples nothing"


@pytest.mark.parametrize("paged", [False, True])
def test_one_call_decodes_and_computes_prompts_and_returns_the_logits_of_both(paged):
    decode, prompts = [chunk(2, 30, 1)], [chunk(1, 0, 6)]
    call, rows, number = packer(paged=paged, tables=2).call(decode, prompts)
    assert number == 1 and set(map(id, rows.values())) == {id(decode[0]), id(prompts[0])}
    flat = np.concatenate([call.decode.scalars, call.prefill.scalars])
    for row, each in rows.items():
        assert flat[call.at[row], [0, 1, 2]].tolist() == [each.start, each.count, each.sequence.slot]
        assert paged or row == each.sequence.slot
    if paged:
        assert call.decode.pages.shape[1] == call.prefill.pages.shape[1] == MAX_LEN // PAGE


def test_prompts_that_do_not_fit_are_left_to_the_next_call():
    prompts = [chunk(slot, 0, 16) for slot in range(3)]
    _, rows, number = packer(paged=True).call([], prompts)
    assert number == 2 and list(rows.values()) == prompts[:2]


def test_drafts_and_adapters():
    given = chunk(1, 9, 3, num_drafts=2, adapter=LoadedAdapter("a", 1, 2, "hash"))
    rows, batch = packer(paged=True).decoding([given], width=4)
    assert rows == {0: given} and batch.ids.tolist() == [[109, 110, 111, 0]]
    assert batch.scalars.tolist() == [[9, 3, 1, 0, 2]]
