"""FP8 attention: results, scales and histories. Formulas in JAX on the same codes replace the calls of cuDNN."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn

import axcore as ax
from axcore.aot.flops import count_flops
from axcore.module import invoke, overwrite_with_gradient, to_fm32
from axcore.nn import Attention, Causal, Full, SlidingWindow
from axcore.testing import RequestSuite, tiny_model, training_request
from axcore.testing.attention_cases import Case, arrays_of, formula
from axcore_cudnn import fp8, fp8_calls
from axcore_cudnn.fp8 import Form, Histories, fp8_attention
from axcore_cudnn.fp8_calls import PROBABILITY_SCALE, Amaxes
from axcore_cudnn.fp8_kernel import CudnnFp8Kernel
from axcore_fp8.quantize import E4M3, amax_of, quantize

LENGTH = 3


class TestRequests(RequestSuite):
    name = "cudnn-fp8"
    kernel = CudnnFp8Kernel.Config(head_dim=128)
    request = training_request("gpu", "NVIDIA H100 80GB HBM3", query_len=256, key_len=256, packed=False)
    supported = [
        {"mask": Causal()},
        {"mask": Causal(), "packed": True},
        {"mask": Full(), "aligned": False, "key_len": 128},
        {"dtype": np.dtype(np.float16)},
        {"device_kind": "NVIDIA B200"},
        {"device_kind": ""},
    ]
    refused = [
        ({"platform": "tpu"}, "requires an NVIDIA GPU, got tpu"),
        ({"device_kind": "NVIDIA L40S"}, "a Hopper GPU or a later one for FP8 attention, got NVIDIA L40S"),
        ({"dtype": np.dtype(np.float32)}, "rounds bfloat16 or float16 to FP8, not float32"),
        ({"head_dim": 64, "value_dim": 64}, "requires head_dim=128 and value_dim=128, got 64 and 64"),
        ({"query_len": 200, "key_len": 200}, "multiples of 128, got 200 and 200"),
        ({"partial": True}, "requires all keys to exist"),
        ({"packed": True}, "full attention and causal masks, not Causal() & SameSegment() on packed rows"),
        ({"mask": Causal() & SlidingWindow(size=4)}, "supports full attention and causal masks, not"),
        ({"aligned": False}, "requires queries and keys of the same tokens"),
        ({"options": ("lse",)}, "does not take lse"),
        ({"options": ("sinks", "softcap")}, "does not take sinks and softcap"),
    ]


def logits_of(scale, causal, q, k):
    logits = scale * jnp.einsum("bthd,bshd->bhts", q, k)
    i, j = jnp.arange(logits.shape[2])[:, None], jnp.arange(logits.shape[3])
    return jnp.where((i >= j) | (not causal), logits, -jnp.inf)


def numbers(codes, scale):
    return codes.astype(jnp.float32) * scale


def rounded(x, scale):
    return numbers(quantize(x, E4M3, scale).codes, scale)


def forward(scale, causal, q, k, v, scales):
    q, k, v = (numbers(x, each) for x, each in zip((q, k, v), scales, strict=False))
    logits = logits_of(scale, causal, q, k)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = rounded(jnp.exp(logits - lse[..., None]), PROBABILITY_SCALE)
    heads = jnp.einsum("bhts,bshd->bthd", weights, v)
    return quantize(heads, E4M3, scales.heads).codes, lse, amax_of(heads)


def backward(scale, causal, q, k, v, heads, lse, heads_grad, scales, made):
    q, k, v, heads = (numbers(x, each) for x, each in zip((q, k, v, heads), scales, strict=True))
    heads_grad = numbers(heads_grad, made.heads)
    weights = rounded(jnp.exp(logits_of(scale, causal, q, k) - lse[..., None]), PROBABILITY_SCALE)
    delta = (heads * heads_grad).sum(-1).swapaxes(1, 2)[..., None]
    exact = scale * weights * (jnp.einsum("bthd,bshd->bhts", heads_grad, v) - delta)
    d_logits = rounded(exact, made.logits)
    dq, dk = jnp.einsum("bhts,bshd->bthd", d_logits, k), jnp.einsum("bhts,bthd->bshd", d_logits, q)
    dv = jnp.einsum("bhts,bthd->bshd", weights, heads_grad)
    codes = (quantize(x, E4M3, each).codes for x, each in zip((dq, dk, dv), made[2:], strict=True))
    return *codes, Amaxes(amax_of(exact), amax_of(dq), amax_of(dk), amax_of(dv))


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    monkeypatch.setattr(fp8, "forward", forward)
    monkeypatch.setattr(fp8, "backward", backward)


def test_scales_are_passed_in_the_order_of_jax(monkeypatch):
    """The names are those of the arguments of jax's function: codes = numbers * scale, numbers = codes * descale."""
    found = []

    def call(primitive, *arrays, **params):
        found.append([float(x.reshape(())) for x in arrays if x.size == 1])
        return [jnp.zeros((1, 1, 1, 1))] * 7 if len(arrays) > 9 else [jnp.zeros((1, 1, 1, 1))] * 4

    monkeypatch.setattr(fp8_calls, "call", call)
    scales, made = fp8_calls.InputScales(2.0, 4.0, 8.0, 16.0), fp8_calls.GradientScales(32.0, 64.0, 128.0, 256.0, 512.0)
    codes, lse = jnp.zeros((1, 2, 1, 4), E4M3), jnp.zeros((1, 1, 2))
    fp8_calls.forward(0.1, True, codes, codes, codes, scales)
    fp8_calls.backward(0.1, True, codes, codes, codes, codes, lse, codes, scales, made)
    of = {"q": 2.0, "k": 4.0, "v": 8.0, "o": 16.0, "s": PROBABILITY_SCALE}
    of |= {"dO": 32.0, "dP": 64.0, "dQ": 128.0, "dK": 256.0, "dV": 512.0}
    for values, names in zip(found, (jax_cudnn.fp8_params_keys_fwd, jax_cudnn.fp8_params_keys_bwd), strict=True):
        expected = {name: of[name.split("_")[1]] ** (-1 if name.startswith("scale") else 1) for name in names}
        assert dict(zip(names, values, strict=True)) == expected


def test_flops_of_both_passes_are_counted_as_fp8(monkeypatch):
    monkeypatch.setattr(fp8, "forward", fp8_calls.forward)
    monkeypatch.setattr(fp8, "backward", fp8_calls.backward)
    x = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)

    def loss(*x):
        return fp8_attention(Form(0.1, True), *x, empty())[0].astype(jnp.float32).sum()

    found = count_flops(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x))
    assert found.total == (2 + 5) * 2 * 2 * 256 * 128 * 128  # a causal query sees half of the keys
    assert set(found.by_dtype) == {"float8"}


def empty(delayed=False):
    zeros = jnp.zeros((4, LENGTH))
    return Histories(zeros if delayed else None, zeros, jnp.zeros(()))


CASE = Case(query_len=64, key_len=64, heads=4, kv_heads=2, head_dim=32, scale=0.2)
CASES = {"causal": CASE, "full": dataclasses.replace(CASE, mask=Full(), allowed=lambda i, j, s, t: i >= -1 + 0 * j)}


@jax.jit
def step(arrays, histories, grad):
    """((heads, overflow), gradients, next histories)"""

    def call(arrays, histories):
        return fp8_attention(Form(CASE.scale, True), *(arrays[name] for name in "qkv"), histories)

    found, pull = jax.vjp(call, arrays, histories)
    return found, *pull((grad, jnp.zeros(())))


def gradient_of(arrays, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=arrays["q"].shape), arrays["q"].dtype)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("steps", [1, 2], ids=["estimated", "from the history"])
def test_heads_and_gradients_equal_the_formula(name, steps):
    case, histories = CASES[name], empty()
    arrays = arrays_of(case, "bfloat16")
    grad = gradient_of(arrays)
    form = Form(case.scale, name == "causal")
    for _ in range(steps):
        (heads, _), pull = jax.vjp(lambda q, k, v, h: fp8_attention(form, q, k, v, h), *arrays.values(), histories)
        *grads, histories = pull((grad, jnp.zeros(())))
    expected = formula(case, arrays, np.asarray(grad, np.float64))
    found = {"heads": heads} | dict(zip("qkv", grads, strict=True))
    for which, exact in {"heads": expected.heads, **expected.grads}.items():
        array = np.asarray(found[which], np.float64)
        error = np.linalg.norm(array - exact) / np.linalg.norm(exact)
        assert error < 0.09, f"{which}: {error:.3f}"
        along = (array * exact).sum() / (exact * exact).sum()
        assert abs(along - 1) < 0.02, f"{which} has {along:.3f} times its size"
    assert float(histories.overflow) == 0


def test_histories_hold_the_largest_values_of_the_last_steps():
    arrays, histories = arrays_of(CASE, "bfloat16"), empty(delayed=True)
    grad = gradient_of(arrays)
    for number in range(1, 5):
        _, _, histories = step(arrays | {"v": number * arrays["v"]}, histories, grad)
    largest = [float(amax_of(x)) for x in (arrays["q"], arrays["k"], arrays["v"], grad)]
    np.testing.assert_allclose(
        histories.inputs,
        np.outer(largest, np.ones(3)) * [[1], [1], [0], [1]] + np.outer([0, 0, largest[2], 0], [4, 3, 2]),
        rtol=1e-2,
    )
    assert (np.asarray(histories.gradients) > 0).all()


def test_a_value_above_the_history_saturates_and_is_counted_and_then_fits():
    arrays, histories = arrays_of(CASE, "bfloat16"), empty(delayed=True)
    grad = gradient_of(arrays)
    _, _, histories = step(arrays, histories, grad)
    (_, overflow), _, histories = step(arrays, histories, grad)
    assert (float(overflow), float(histories.overflow)) == (0, 0)
    (heads, overflow), _, histories = step(arrays | {"v": 1000 * arrays["v"]}, histories, 1000 * grad)
    assert float(overflow) == 1
    assert float(histories.overflow) >= 3  # the gradients of the heads, of the values, and others that follow
    assert np.isfinite(np.asarray(heads, np.float32)).all()
    (_, overflow), _, _ = step(arrays | {"v": 1000 * arrays["v"]}, histories, 1000 * grad)
    assert float(overflow) == 0


def test_infinities_are_counted_and_not_masked():
    arrays, histories = arrays_of(CASE, "bfloat16"), empty()
    grad = gradient_of(arrays).at[0, 0, 0, 0].set(jnp.inf)
    (heads, overflow), _, histories = step(arrays | {"v": arrays["v"].at[0, 0, 0, 0].set(jnp.inf)}, histories, grad)
    assert float(overflow) >= 1
    assert float(histories.overflow) >= 1
    assert np.isnan(np.asarray(heads, np.float32)).any()
    assert np.isfinite(histories.gradients).all()


@pytest.mark.long
@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_a_model_reports_overflow_and_updates_its_histories(scaling, monkeypatch):
    monkeypatch.setattr(CudnnFp8Kernel, "supports", lambda self, request: None)
    options = {"scaling": scaling, "amax_history_len": LENGTH}
    cfg = ax.pipe(tiny_model(), ax.use("cudnn-fp8", **options)).set(dtypes=ax.DTypes(compute=jnp.bfloat16))
    assert {node.kernel for _, node in ax.select(cfg, Attention)} == {CudnnFp8Kernel.Config(**options)}
    fn, params, state = ax.functional(cfg.build(rngs=ax.Rngs(0)))
    ids = jnp.arange(16, dtype=jnp.int32).reshape(2, 8) % 7
    _, reports = invoke(fn.bind(params, state), ids)
    found = {path.rsplit(".", 1)[-1]: float(each.value.sum()) for path, each in reports.summaries.items()}
    assert found["overflow"] >= 0 and found["gradient_overflow"] == 0

    def loss(params, state):
        return jnp.square(fn(params, state, ids)[0][0].astype(jnp.float32)).sum()

    gradient = jax.grad(loss, argnums=1, allow_int=True)(params, to_fm32(state))
    after = overwrite_with_gradient(gradient, state)
    histories = [leaf for leaf in jax.tree.leaves(after) if leaf.ndim > 1]
    assert len(histories) == (2 if scaling == "delayed" else 1)
    assert all((leaf[..., 0] > 0).all() for leaf in histories)
