"""An output head with FP8 products and a loss in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import invoke, overwrite_with_gradient, to_fm32
from axcore.nn import Linear
from axcore.testing import tiny_batch, tiny_model
from axcore.train import CrossEntropy
from axcore_fp8.fp8 import Fp8

pytestmark = pytest.mark.long

BATCH = tiny_batch(2, 8)


def head(**options):
    """(call, params, state) of a small model with FP8 products in the head only."""
    cfg = tiny_model().set(head=Linear.Config(numerics=Fp8.Config(**options)))
    return ax.functional(cfg.build(rngs=ax.Rngs(0)))


def objective(chunk):
    return CrossEntropy.Config(chunk=chunk).build()


@pytest.mark.parametrize("scaling", ["current", "delayed", "block"])
def test_chunks_change_neither_loss_nor_gradients_nor_histories(scaling):
    """Up to numbers that are subnormal in the codes of one chunk, since scales are powers of two."""
    options = {"amax_history_len": 3} if scaling == "delayed" else {}
    fn, params, state = head(scaling=scaling, **options)
    state = jax.tree.map(lambda x: x + 16.0 if x.ndim else x, state)  # histories of earlier steps

    def run(chunk):
        def loss(params, state):
            (total, reports), _ = fn(params, state, BATCH, method=objective(chunk))
            return total.mean(), reports.summaries["head.numerics.overflow"].value

        def step(params, state):
            call = jax.value_and_grad(loss, (0, 1), has_aux=True, allow_int=True)
            (value, overflow), (of_params, of_state) = call(params, to_fm32(state))
            return value, overflow, of_params, overwrite_with_gradient(of_state, state)

        return jax.device_get(jax.jit(step)(params, state))

    (loss, overflow, gradients, new), (found, counted, *others) = run(None), run(5)
    assert overflow == counted == 0
    np.testing.assert_allclose(found, loss, rtol=1e-3)
    for mine, theirs in zip(jax.tree.leaves(others[0]), jax.tree.leaves(gradients), strict=True):
        assert np.linalg.norm(mine - theirs) < 0.02 * np.linalg.norm(theirs)
    for path, history in jax.tree.leaves_with_path(new):
        mine = others[1]
        for key in path:
            mine = mine[key.key]
        np.testing.assert_allclose(mine, history, rtol=1e-5, err_msg=jax.tree_util.keystr(path))
    assert scaling != "delayed" or new["head"]["numerics"]["gradient"][0] > 0


@pytest.mark.parametrize("chunk", [None, 4])
def test_overflow_is_counted_in_each_chunk(chunk):
    """An infinite weight, and the inputs of the chunks, which are finite."""
    fn, params, state = head()
    params["head"]["weight"] = params["head"]["weight"].at[0, 0].set(jnp.inf)
    _, reports = invoke(fn.bind(params, state), BATCH, method=objective(chunk))
    assert float(reports.summaries["head.numerics.overflow"].value) == (1 if chunk is None else 4)
