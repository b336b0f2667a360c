"""FP8 attention: results, scales and refused gradients. A formula in JAX on the same codes replaces the cuDNN call."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn

import axcore as ax
from axcore.aot.flops import count_flops
from axcore.module import invoke
from axcore.nn import Attention, Causal, Full, SlidingWindow
from axcore.nn.choosing import recording
from axcore.parallel import Mesh
from axcore.testing import RequestSuite, tiny_model, training_request
from axcore.testing.attention_cases import Case, arrays_of, formula
from axcore_cudnn import fp8, fp8_calls
from axcore_cudnn.fp8 import fp8_attention
from axcore_cudnn.fp8_calls import PROBABILITY_SCALE, Form
from axcore_cudnn.fp8_kernel import CudnnFp8Kernel
from axcore_fp8.quantize import E4M3, amax_of, quantize


class TestRequests(RequestSuite):
    name = "cudnn-fp8"
    kernel = CudnnFp8Kernel.Config(head_dim=128)
    request = training_request("gpu", "NVIDIA H100 80GB HBM3", query_len=256, key_len=256, packed=False, training=False)
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
        ({"training": True}, "gradients of the values had up to 17 times their size"),
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


def numbers(codes, scale):
    return codes.astype(jnp.float32) * scale


def forward(form, q, k, v, scales):
    q, k, v = (numbers(x, each) for x, each in zip((q, k, v), scales, strict=False))
    logits = form.scale * jnp.einsum("bthd,bshd->bhts", q, k)
    i, j = jnp.arange(logits.shape[2])[:, None], jnp.arange(logits.shape[3])
    weights = jax.nn.softmax(jnp.where((i >= j) | (not form.causal), logits, -jnp.inf), axis=-1)
    weights = numbers(quantize(weights, E4M3, PROBABILITY_SCALE).codes, PROBABILITY_SCALE)
    heads = jnp.einsum("bhts,bshd->bthd", weights, v)
    return quantize(heads, E4M3, scales.heads).codes, amax_of(heads)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    monkeypatch.setattr(fp8, "forward", forward)


def test_scales_are_passed_in_the_order_of_jax(monkeypatch):
    """The names are those of the arguments of jax's function: codes = numbers * scale, numbers = codes * descale."""
    found = []

    def call(primitive, *arrays, **params):
        found.extend(float(x.reshape(())) for x in arrays if x.size == 1)
        return [jnp.zeros((1, 1, 1, 1))] * 3

    monkeypatch.setattr(fp8_calls, "call", call)
    codes = jnp.zeros((1, 2, 1, 4), E4M3)
    fp8_calls.forward(Form(0.1, True), codes, codes, codes, fp8_calls.Scales(2.0, 4.0, 8.0, 16.0))
    of = {"q": 2.0, "k": 4.0, "v": 8.0, "o": 16.0, "s": PROBABILITY_SCALE}
    names = jax_cudnn.fp8_params_keys_fwd
    assert found == [of[name.split("_")[1]] ** (-1 if name.startswith("scale") else 1) for name in names]


def test_flops_are_counted_as_fp8(monkeypatch):
    monkeypatch.setattr(fp8, "forward", fp8_calls.forward)
    x = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)
    found = count_flops(jax.make_jaxpr(lambda *x: fp8_attention(Form(0.1, True), *x))(x, x, x))
    assert found.total == 2 * 2 * 2 * 256 * 128 * 128  # a causal query sees half of the keys
    assert set(found.by_dtype) == {"float8"}


CASE = Case(query_len=64, key_len=64, heads=4, kv_heads=2, head_dim=32, scale=0.2)
CASES = {"causal": CASE, "full": dataclasses.replace(CASE, mask=Full(), allowed=lambda i, j, s, t: i >= -1 + 0 * j)}
FORM = Form(CASE.scale, causal=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1.0, 1000.0])
def test_heads_equal_the_formula(name, size):
    case = CASES[name]
    arrays = arrays_of(case, "bfloat16")
    arrays = arrays | {"v": size * arrays["v"]}
    heads, overflow = fp8_attention(Form(case.scale, name == "causal"), *arrays.values())
    exact, found = formula(case, arrays).heads, np.asarray(heads, np.float64)
    assert np.linalg.norm(found - exact) < 0.07 * np.linalg.norm(exact)
    assert abs((found * exact).sum() / (exact * exact).sum() - 1) < 0.01
    assert float(overflow) == 0


def test_infinities_are_counted_and_not_masked():
    arrays = arrays_of(CASE, "bfloat16")
    arrays = arrays | {"v": arrays["v"].at[0, 0, 0, 0].set(jnp.inf)}
    heads, overflow = fp8_attention(FORM, *arrays.values())
    assert float(overflow) >= 1
    assert np.isnan(np.asarray(heads, np.float32)).any()


@pytest.mark.parametrize("transform", [jax.grad, lambda fn: lambda x: jax.jvp(fn, (x,), (x,))], ids=["vjp", "jvp"])
def test_a_gradient_raises(transform):
    arrays = arrays_of(CASE, "bfloat16")
    with pytest.raises(ax.ConfigError, match=r'computes no gradients: .* Use the kernel "cudnn" in training'):
        transform(lambda q: fp8_attention(FORM, q, arrays["k"], arrays["v"])[0].astype(jnp.float32).sum())(arrays["q"])


@pytest.mark.long
def test_a_model_in_evaluation_reports_overflow(monkeypatch):
    monkeypatch.setattr(CudnnFp8Kernel, "supports", lambda self, request: None)
    cfg = ax.pipe(tiny_model(), ax.use("cudnn-fp8")).set(dtypes=ax.DTypes(compute=jnp.bfloat16))
    fn, params, state = ax.functional(cfg.build(rngs=ax.Rngs(0)))
    _, reports = invoke(fn.bind(params, state), jnp.arange(16, dtype=jnp.int32).reshape(2, 8) % 7)
    found = {path.rsplit(".", 1)[-1]: float(each.value.sum()) for path, each in reports.summaries.items()}
    assert found["overflow"] == 0


def test_a_model_in_training_is_refused():
    """An order of kernels trains in bfloat16, and evaluates in FP8."""
    cfg = ax.pipe(tiny_model(), ax.use("kernels", order=("cudnn-fp8", "cudnn")))
    cfg = ax.select(cfg, Attention).set(head_dim=128, mask=Causal()).set(dtypes=ax.DTypes(compute=jnp.bfloat16))
    fn, params, state = ax.module.abstract(cfg)
    ids = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    chosen = {}
    for training in (True, False):
        with recording() as found, Mesh().abstract(1, "gpu", "NVIDIA H100").active():
            jax.eval_shape(
                lambda params, ids, training=training: fn(params, state, ids, training=training)[0][0], params, ids
            )
        chosen[training] = {type(each.chosen).__name__ for each in found}
    assert chosen == {True: {"CudnnKernel"}, False: {"CudnnFp8Kernel"}}
