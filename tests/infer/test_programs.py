"""`Programs`: what calls of the model leave in memory."""

import numpy as np

import axcore as ax
from axcore.infer import Decoder
from axcore.infer.execution.batches import ModelCall, Packer
from axcore.infer.execution.buckets import Buckets, Shape
from axcore.infer.execution.programs import Programs
from axcore.nn import ContiguousCache
from axcore.testing import tiny_model


def test_calls_write_their_logits_to_the_same_place():
    model = tiny_model().build(rngs=ax.Rngs(0))
    decoder, params, state = Decoder.of(model, cache=ContiguousCache.Config(), batch_size=4, max_len=8)
    programs = Programs(decoder, params, state, None)
    packer = Packer(decoder, Buckets(rows=(4,), prompts=(), mixed=(), widths=(), pages=(), part=None))
    places = {rows: set() for rows in (1, 4)}
    for rows in (4, 1, 4, 1):
        logits = programs.logits(ModelCall(None, packer.batch({}, Shape(rows, 2))))
        assert np.isnan(logits).all()
        places[rows].add(logits.unsafe_buffer_pointer())
    assert [len(each) for each in places.values()] == [1, 1]
    of_drafts = {programs.logits_of_drafts(packer.batch({}, Shape(4, 3))).unsafe_buffer_pointer() for _ in range(3)}
    assert len(of_drafts) == 1
