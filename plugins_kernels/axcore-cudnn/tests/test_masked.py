"""Attention with a mask as a bias, and the choice of the call, with formulas in JAX in place of the calls of cuDNN."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.nn import KernelRequest, attend_in_parts
from axcore.parallel import Mesh
from axcore.testing import tiny_model
from axcore.testing.attention_cases import CASES, arrays_of, formula, inputs_of
from axcore_cudnn import fused, masked
from axcore_cudnn.kernel import CudnnKernel, _needs_bias

from . import cudnn_calls

pytestmark = pytest.mark.long

KERNEL = CudnnKernel.Config(head_dim=64).build(rngs=ax.Rngs(0))
MASKED = ("one decoded token", "prefill chunk in a window", "prefix")
MORE = ("prefill chunk", "rows at different positions", "sinks while decoding", "union of two masks")


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Records the calls of `masked`."""
    found = []

    def record(name):
        def call(*args, **kwargs):
            found.append((name, kwargs))
            return getattr(cudnn_calls, name)(*args, **kwargs)

        return call

    for name in ("forward", "backward"):
        monkeypatch.setattr(masked, name, record(name))
        monkeypatch.setattr(fused, name, getattr(cudnn_calls, name))
    monkeypatch.setattr(CudnnKernel, "supports", lambda self, request: None)
    return found


def results(case, arrays, call=KERNEL):
    """The heads, the lse and the gradients, in float64."""
    grad = np.random.default_rng(0).normal(size=formula(case, arrays).heads.shape)

    def scalar(arrays):
        heads, lse = call(inputs_of(case, arrays, return_lse=True))
        return (heads * grad).sum(), (heads, lse)

    grads, (heads, lse) = jax.jit(jax.grad(scalar, has_aux=True))(arrays)
    expected = formula(case, arrays, grad)
    return {"heads": heads, "lse": lse, **grads}, {"heads": expected.heads, "lse": expected.lse, **expected.grads}


@pytest.mark.parametrize("name", [*MASKED, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_results_equal_the_formula(calls, name):
    found, expected = results(CASES[name], arrays_of(CASES[name], "float32"))
    for which, array in expected.items():
        np.testing.assert_allclose(found[which], array, rtol=2e-5, atol=2e-5, err_msg=which)
    assert [each for each, _ in calls] == ["forward", "backward"]


def test_cudnn_reads_no_keys_after_the_last_visible_one(calls):
    case = dataclasses.replace(CASES["rows at different positions"], start=8, query_len=1, written=9, behind=4)
    arrays = arrays_of(case, "float32")
    beyond = (np.arange(case.key_len) >= np.array([[9], [5]]))[..., None, None]
    arrays = arrays | {name: jnp.where(beyond, jnp.nan if name == "v" else 9.0, arrays[name]) for name in "k"}
    heads, _ = KERNEL(inputs_of(case, arrays))
    np.testing.assert_allclose(heads, formula(case, arrays).heads, rtol=2e-5, atol=2e-5)
    ((_, of_call),) = calls
    np.testing.assert_array_equal(of_call["lengths"][1], [9, 5])
    np.testing.assert_array_equal(of_call["lengths"][0], [2, 2])  # cuDNN requires an even number of queries


def test_a_query_without_keys_does_not_count_in_a_merge():
    case = dataclasses.replace(CASES["rows at different positions"], start=4, written=3, behind=3, key_len=16)
    arrays = arrays_of(case, "float32")

    def scalar(arrays):
        heads, lse = KERNEL(inputs_of(case, arrays, return_lse=True))
        return heads.sum(), (heads, lse)

    grads, (heads, lse) = jax.jit(jax.grad(scalar, has_aux=True))(arrays)
    assert all(np.isfinite(x).all() for x in (*grads.values(), heads))
    assert (np.asarray(lse)[1] < -1e30).all()
    assert not np.asarray(grads["v"])[1].any()


def test_merged_parts_of_a_causal_row_equal_one_call():
    """Each part is a call on queries and keys of different tokens; the first queries see no key of the second part."""
    case = CASES["sinks"]

    def in_parts(inputs):
        parts = [jax.tree.map(lambda x, at=at: x[:, at], inputs.plain) for at in (slice(7), slice(7, None))]
        with ax.module.root(KERNEL, key=None, training=True):
            return attend_in_parts(KERNEL, inputs, parts)

    found, expected = results(case, arrays_of(case, "float32"), in_parts)
    for which, array in expected.items():
        np.testing.assert_allclose(found[which], array, rtol=3e-5, atol=3e-5, err_msg=which)


@pytest.mark.parametrize("name", ["causal", "documents", "window and documents", "more keys than queries"])
def test_masks_of_cudnn_take_no_bias(name):
    assert not _needs_bias(KernelRequest.of(inputs_of(CASES[name], arrays_of(CASES[name], "float32"))))


def test_sharded_rows_and_heads_take_no_bias(calls):
    """Inside `shard_map`, queries and keys are still known to be the same tokens."""
    cfg = ax.pipe(tiny_model(), ax.use("cudnn")).set(dtypes=ax.DTypes(compute=jnp.bfloat16))
    mesh = Mesh(shape={"data": 4, "tensor": 2}, rules={"batch": "data", "head": "tensor", "kv_head": "tensor"})
    fn, params, state = ax.module.abstract(cfg)
    ids = jax.ShapeDtypeStruct((8, 8), jnp.int32)
    with mesh.abstract(8, "gpu").active():
        jax.eval_shape(lambda params, ids: fn(params, state, ids)[0][0], params, ids)
    assert not calls
