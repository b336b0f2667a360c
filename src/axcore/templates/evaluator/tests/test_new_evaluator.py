"""Tests of axcore-new-evaluator."""

import types

import jax.numpy as jnp
import pytest

from axcore_new_evaluator.accuracy import Accuracy


class Model:
    """The second of three tokens is always the most likely one, and the first the second most likely one."""

    def bind(self, params, state):
        return lambda ids, **_: jnp.broadcast_to(jnp.asarray([1.0, 2.0, 0.0]), (*ids.shape, 3))


@pytest.mark.parametrize(("top", "expected"), [(1, 2 / 3), (2, 1.0)])
def test_accuracy_counts_the_tokens_with_weight(top, expected):
    evaluator = Accuracy.Config(top=top).build()
    evaluator.start(types.SimpleNamespace(program=types.SimpleNamespace(fn=Model())))
    ids = jnp.asarray([[1, 1, 0, 2]])
    batch = {"inputs": ids, "targets": ids, "weights": ids < 2, "positions": None, "segment_ids": None}
    right, weight = evaluator.count({}, {}, batch)
    assert float(right / weight) == pytest.approx(expected)
