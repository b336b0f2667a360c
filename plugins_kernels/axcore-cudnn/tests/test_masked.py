"""Attention with a mask as a bias or with lengths, and the choice between them, with formulas in JAX in place of the
calls of cuDNN."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.nn import Causal, ContiguousCache, KernelRequest, SameSegment, SlidingWindow, TokenInfo, attend_in_parts
from axcore.parallel import Mesh
from axcore.testing import tiny_model
from axcore.testing.attention_cases import CASES, arrays_of, formula, inputs_of
from axcore.testing.attention_views import VIEWS
from axcore_cudnn import decoded, fused, masked
from axcore_cudnn.kernel import CudnnKernel, _is_decoding, _needs_bias

from . import cudnn_calls

pytestmark = pytest.mark.long

KERNEL = CudnnKernel.Config(head_dim=64).build(rngs=ax.Rngs(0))
MASKED = ("prefill chunk in a window", "prefix")
MORE = ("prefill chunk", "rows at different positions", "union of two masks")
ROWS = dataclasses.replace(CASES["rows at different positions"], start=8, query_len=1, written=9, behind=4)
"""One query in each row; rows of 9 and 5 tokens."""
WINDOW = Causal() & SlidingWindow(size=4)
DECODED = {
    "one decoded token": CASES["one decoded token"],
    "sinks": CASES["sinks while decoding"],
    "rows of different lengths, two heads per kv head": dataclasses.replace(ROWS, kv_heads=2),
    "window of all keys": dataclasses.replace(ROWS, mask=Causal() & SlidingWindow(size=12)),
}


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Records the calls with a bias or with lengths."""
    found = []

    def record(name):
        def call(*args, **kwargs):
            found.append((name, kwargs))
            return getattr(cudnn_calls, name)(*args, **kwargs)

        return call

    for name in ("forward", "backward"):
        monkeypatch.setattr(masked, name, record(name))
        monkeypatch.setattr(decoded, name, record(name), raising=False)
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
    case = dataclasses.replace(ROWS, mask=WINDOW, allowed=lambda i, j, s, t: (i >= j) & (i - j < 4))
    arrays = arrays_of(case, "float32")
    beyond = (np.arange(case.key_len) >= np.array([[9], [5]]))[..., None, None]
    arrays = arrays | {name: jnp.where(beyond, jnp.nan if name == "v" else 9.0, arrays[name]) for name in "k"}
    heads, _ = KERNEL(inputs_of(case, arrays))
    np.testing.assert_allclose(heads, formula(case, arrays).heads, rtol=2e-5, atol=2e-5)
    ((_, of_call),) = calls
    np.testing.assert_array_equal(of_call["lengths"][1], [9, 5])
    np.testing.assert_array_equal(of_call["lengths"][0], [2, 2])  # cuDNN requires an even number of queries


@pytest.mark.parametrize("name", DECODED)
def test_decoded_tokens_take_lengths_and_equal_the_formula(calls, name):
    found, expected = results(DECODED[name], arrays_of(DECODED[name], "float32"))
    for which, array in expected.items():
        np.testing.assert_allclose(found[which], array, rtol=2e-5, atol=2e-5, err_msg=which)
    (_, of_forward), (_, of_backward) = calls
    assert set(of_forward) == {"lengths"}
    assert set(of_backward) == {"bias"}


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("view", [lambda kv: kv, VIEWS["rows of a cache"], VIEWS["pages"]], ids=["", "cache", "pages"])
def test_decoding_uses_no_stale_key(calls, view, kv_heads):
    case = dataclasses.replace(ROWS, kv_heads=kv_heads)
    arrays = arrays_of(case, "float32")
    expected = formula(case, arrays)
    stale = (np.arange(case.key_len) >= np.array([[9], [5]]))[..., None, None]
    inputs = inputs_of(case, arrays | {name: jnp.where(stale, 1e4, arrays[name]) for name in "kv"}, return_lse=True)
    heads, lse = KERNEL(inputs.replace(kv=view(inputs.plain)))
    np.testing.assert_allclose(heads, expected.heads, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse, expected.lse, rtol=2e-5, atol=2e-5)
    ((_, of_call),) = calls
    assert "bias" not in of_call
    np.testing.assert_array_equal(of_call["lengths"], [[1, 1], [9, 5]])


def test_a_decoded_row_without_keys_has_heads_of_zero():
    """A slot without a request, whose stale keys may not be finite."""
    case = dataclasses.replace(ROWS, start=0, written=5, behind=5)
    arrays = arrays_of(case, "float32")
    inputs = inputs_of(case, arrays | {name: arrays[name].at[1].set(jnp.nan) for name in "kv"}, return_lse=True)
    index = jnp.asarray([[4], [0]])
    heads, lse = KERNEL(inputs.replace(query=TokenInfo(index, index)))
    assert np.isfinite(heads[0]).all() and np.asarray(heads[0]).any()
    assert not np.asarray(heads[1]).any()
    assert (np.asarray(lse)[1] < -1e30).all()


@pytest.mark.parametrize(
    "changes",
    [{"query_len": 2}, {"mask": WINDOW}, {"valid_first": False}, {"mask": Causal() & SameSegment(), "packed": True}],
    ids=repr,
)
def test_other_calls_of_a_cache_take_a_bias(changes):
    request = KernelRequest.of(inputs_of(ROWS, arrays_of(ROWS, "float32")))
    assert _is_decoding(request)
    other = dataclasses.replace(request, **changes)
    assert not _is_decoding(other)
    assert _needs_bias(other)


def test_a_decoder_gives_the_logits_of_the_whole_text(calls):
    """Rows of different lengths; decoding steps with slots, and with every slot, one of which has no request."""
    cfg = ax.pipe(tiny_model(), ax.use("cudnn")).set(dtypes=ax.DTypes(compute=jnp.float32))
    model = cfg.build(rngs=ax.Rngs(0))
    fn, params, state = ax.functional(model)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 7, (2, 8)), jnp.int32)
    expected = fn(params, state, ids)[0][0]
    decoder, params, state = Decoder.of(model, cache=ContiguousCache.Config(), batch_size=3, max_len=12)
    slots, lengths = jnp.asarray([2, 0]), jnp.asarray([5, 3])
    _, state = decoder(params, state, Step(ids[:, :5], start=0 * lengths, lengths=lengths, slots=slots))
    calls.clear()
    now = jnp.take_along_axis(ids, lengths[:, None], axis=1)
    logits, state = decoder(params, state, Step(now, start=lengths, slots=slots))
    np.testing.assert_allclose(logits[:, 0], expected[jnp.arange(2), lengths], rtol=2e-4, atol=2e-4)
    now, start, lengths = (jnp.asarray(each) for each in ([ids[1, 4], 0, ids[0, 6]], [4, 0, 6], [1, 0, 1]))
    every = Step(now[:, None], start=start, lengths=lengths)
    logits, _ = decoder(params, state, every)
    np.testing.assert_allclose(logits[::2, 0], expected[jnp.asarray([1, 0]), jnp.asarray([4, 6])], rtol=2e-4, atol=2e-4)
    assert calls and not any("bias" in each for _, each in calls)


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
