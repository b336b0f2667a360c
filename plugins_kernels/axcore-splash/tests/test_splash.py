"""The Splash kernel: supported requests and block sizes, and numerical results in the Pallas interpreter on a CPU. They
are not those of a TPU: tests of the compiled program are in test_aot.py."""

import dataclasses
import functools
import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.aot.flops import count_flops
from axcore.nn import (
    Attention,
    AttentionInputs,
    Causal,
    Contiguous,
    Full,
    KernelRequest,
    SameSegment,
    SlidingWindow,
    TokenInfo,
    Tuning,
    attend_in_parts,
    refusal,
)
from axcore.nn.attention.context.ring import RingAttention
from axcore.parallel import Mesh
from axcore.testing import KernelSuite, RequestSuite, tiny_model, training_request
from axcore.testing.devices import steps
from axcore.testing.models import tiny_batch
from axcore_splash import primitives
from axcore_splash.blocks import Blocks, Tile, default_block
from axcore_splash.fused import attention
from axcore_splash.kernel import SplashKernel
from axcore_splash.primitives import Form

WELL = training_request("tpu", "TPU v5")


def built(**fields):
    return SplashKernel.Config(head_dim=64, **fields).build(rngs=ax.Rngs(0))


class TestRequests(RequestSuite):
    name = "splash"
    kernel = SplashKernel.Config(head_dim=64)
    request = WELL
    supported = [
        {"device_kind": ""},
        {"dtype": np.dtype(np.float32)},
        {"head_dim": 192, "value_dim": 128},
        {"query_len": 63, "key_len": 63},
        {"options": ("softcap", "sinks", "lse")},
        {"mask": SlidingWindow(size=4)},
        {"mask": Full(), "aligned": False, "key_len": 100},
        {"partial": True},
    ]
    refused = [
        ({"platform": "cpu"}, "requires a TPU, got cpu"),
        ({"platform": "gpu"}, "requires a TPU, got gpu"),
        ({"dtype": np.dtype(np.float16)}, "bfloat16 or float32, not float16"),
        ({"query_len": 32, "aligned": False}, "got 32 queries and 64 keys of different tokens"),
        ({"mask": Causal() | SameSegment()}, "supports full attention, causal masks, windows and documents"),
        ({"options": ("bias", "dropout")}, "does not take bias and dropout"),
    ]
    elsewhere = "got cpu"


def test_blocks_are_tunable():
    request = dataclasses.replace(WELL, query_len=1024, key_len=384)
    default, *others = built().candidates(request)
    assert default == dict(
        block_q=512, block_kv=128, block_q_dkv=512, block_kv_dkv=128, block_q_dq=512, block_kv_dq=128
    )
    assert [each["block_q"] for each in others] == [256, 512, 1024]
    assert {each["block_kv_dq"] for each in others} == {256}
    assert not any("dq" in name for each in built(fused_backward=True).candidates(request) for name in each)
    tuning = Tuning(device_kind="TPU v5", settings={request.signature: others[0]})
    assert built(tuning=tuning).settings(request) == others[0]
    assert built(tuning=tuning, block_q=128).settings(request) == others[0] | {"block_q": 128}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"block_q": 100}, r"tuning: block_q=100 is not a multiple of 128"),
        ({"block_kv": 0}, "block_kv must be at least 1"),
    ],
    ids=["not a multiple", "zero"],
)
def test_measured_blocks_are_checked(settings, told):
    tuning = Tuning(device_kind=WELL.device_kind, settings={WELL.signature: settings})
    with pytest.raises(ax.ConfigError, match=rf"{told}.*axcore tune"):
        built(tuning=tuning).settings(WELL)


def test_the_interpreter_runs_only_on_cpus():
    kernel = built(interpret=True)
    assert refusal(kernel, dataclasses.replace(WELL, platform="cpu")) is None
    assert refusal(kernel, WELL) == "interpret=True is for tests on a CPU, got tpu"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"block_q": 200}, "block_q=200 is not a multiple of 128. Set it to 256, or to None"),
        ({"block_kv_dq": 64}, "block_kv_dq=64 is not a multiple of 128. Set it to 128"),
        (
            {"block_kv": 768, "block_kv_compute": 512},
            "block_kv_compute=512 does not divide block_kv=768. Set it to 128 or 256 or 384 or 768",
        ),
        ({"block_kv_dkv": 256, "block_kv_dkv_compute": 512}, "does not divide block_kv_dkv=256. Set it to 128 or 256"),
        ({"block_kv_compute": 128}, "block_kv_compute=128 requires block_kv. Set block_kv to a multiple of 128"),
        ({"fused_backward": True, "block_q_dq": 128}, "block_q_dq=128 has no effect with fused_backward=True"),
    ],
    ids=str,
)
def test_invalid_block_sizes(fields, problem):
    with pytest.raises(ax.ConfigError, match=problem):
        built(**fields)


def test_default_blocks_add_little_padding():
    assert {length: default_block(length) for length in (1, 128, 257, 640, 1024, 4096, 8000)} == {
        1: 128,
        128: 128,
        257: 128,
        640: 128,
        1024: 512,
        4096: 512,
        8000: 512,
    }


def test_blocks_are_limited_to_the_sequence():
    blocks = Blocks(block_q=1024, block_kv=2048, block_kv_compute=1024, block_q_dq=256)
    assert blocks.forward(4096, 4096) == Tile(1024, 2048, 1024)
    assert blocks.forward(700, 300) == Tile(768, 384, 128)
    assert blocks.dq(100, 1000) == Tile(128, 512, 512)


def test_unsupported_jax_version_names_what_is_missing(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", lambda name: types.SimpleNamespace(BlockSizes=None))
    with pytest.raises(ImportError, match=r"requires _splash_attention_forward, .* Install jax 0\.11\.2"):
        primitives._private()


def test_options_of_the_feature_reach_every_attention():
    cfg = ax.pipe(tiny_model(), ax.use("splash", fused_backward=True))
    assert all(node.kernel == SplashKernel.Config(fused_backward=True) for _, node in ax.select(cfg, Attention))


class TestSplash(KernelSuite):
    """All cases, in the interpreter."""

    pytestmark = pytest.mark.slow
    name = "splash"
    options = {"interpret": True}
    lacks = frozenset({"any_mask", "bias", "decoding", "dropout", "prefix"})


class TestSplashFused(TestSplash):
    """The backward pass of one kernel."""

    options = {"interpret": True, "fused_backward": True}


SOME = ("causal", "full attention", "longer than a block", "value_dim 32", "window and documents", "scale and softcap")


@pytest.mark.long
@pytest.mark.parametrize("suite", [TestSplash, TestSplashFused])
@pytest.mark.parametrize("name", SOME)
def test_gradients_of_some_cases_equal_the_formula(suite, name):
    suite().test_gradients_equal_the_formula(name)


@pytest.mark.long
@pytest.mark.parametrize("name", ["sinks", "documents"])
def test_some_cases_equal_the_formula(name):
    suite = TestSplash()
    suite.test_outputs_equal_the_formula(name)
    suite.test_lse_equals_the_formula(name)
    suite.test_gradients_equal_the_formula(name)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 300), (False, 300)])
def test_flops_leave_out_the_blocks_that_are_skipped(causal, window):
    """Also in scanned layers with remat. The forward kernel computes 2 products, the backward kernels 4 and 3."""
    length, block, heads, dim = 1024, 128, 2, 64
    sizes = {f"block_{kind}": block for kind in ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")}
    form = Form(1.0, causal=causal, window=window, blocks=Blocks(**sizes))
    q, k = np.mgrid[:length, :length]
    seen = (k <= q if causal else np.full(q.shape, True)) & (abs(q - k) < (window or length))
    blocks = seen.reshape(length // block, block, length // block, block).any((1, 3)).sum()
    product = 2 * heads * dim * block**2 * blocks

    def total(q, k, v):
        layer = jax.checkpoint(lambda q: attention(form, q, k, v)[0])
        return jax.lax.scan(lambda q, _: (layer(q), None), q, None, length=3)[0].sum()

    x = jax.ShapeDtypeStruct((1, length, heads, dim), jnp.float32)
    assert count_flops(jax.make_jaxpr(total)(x, x, x)).total == 3 * 2 * product
    gradient = jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(x, x, x)
    assert count_flops(gradient).total == 3 * (2 + 2 + 4 + 3) * product


def random_inputs(seq=24, key_len=None, heads=4, kv_heads=2, dim=32, dtype=jnp.float32, valid=None, **more):
    rng = np.random.default_rng(0)
    key_len = key_len or seq
    shapes = [(2, seq, heads, dim), (2, key_len, kv_heads, dim), (2, key_len, kv_heads, dim)]
    q, k, v = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    key = TokenInfo.of(k[..., 0, 0], valid=valid)
    query = TokenInfo.of(q[..., 0, 0])
    return AttentionInputs(q, Contiguous(k, v, key), query, scale=dim**-0.5, **more)


def heads_and_gradients(attend, inputs):
    def scalar(q, k, v):
        heads = attend(inputs.replace(q=q, kv=dataclasses.replace(inputs.plain, k=k, v=v)))
        return (heads.astype(jnp.float32) * jnp.sin(jnp.arange(heads.size).reshape(heads.shape))).sum(), heads

    kv = inputs.plain
    grads, heads = jax.jit(jax.grad(scalar, argnums=(0, 1, 2), has_aux=True))(inputs.q, kv.k, kv.v)
    return [np.asarray(x, np.float64) for x in (heads, *grads)]


def reference(inputs):
    return ax.nn.ReferenceKernel.Config(head_dim=32).build(rngs=ax.Rngs(0))(inputs)[0]


def assert_close(found, expected):
    for one, two in zip(found, expected, strict=True):
        assert np.linalg.norm(one - two) <= 1e-5 * np.linalg.norm(two)


@pytest.mark.long
def test_cross_attention_ignores_invalid_keys():
    """More keys than queries, some of them invalid, and padding of both."""
    valid = jnp.arange(40)[None] < jnp.array([[33], [7]])
    inputs = random_inputs(key_len=40, valid=valid, mask=Full(), softcap=5.0)
    kernel = built(interpret=True)
    assert refusal(kernel, dataclasses.replace(KernelRequest.of(inputs), platform="cpu")) is None
    found = heads_and_gradients(lambda x: kernel(x)[0], inputs)
    assert_close(found, heads_and_gradients(reference, inputs))
    assert not found[2][1, 7:].any()


def test_merged_halves_of_the_keys_equal_one_call():
    """The entry of ring attention: the backward pass gets the merged heads and lse, sinks included."""
    inputs = random_inputs(mask=Full(), sinks=jnp.linspace(-1.0, 1.0, 4))
    kernel = built(interpret=True)

    def in_halves(inputs):
        parts = [jax.tree.map(lambda x, at=at: x[:, at], inputs.plain) for at in (slice(9), slice(9, None))]
        with ax.module.root(kernel, key=None, training=True):
            return attend_in_parts(kernel, inputs, parts)[0]

    assert_close(heads_and_gradients(in_halves, inputs), heads_and_gradients(reference, inputs))


@pytest.mark.long
def test_a_query_that_sees_no_key_gives_finite_gradients():
    valid = jnp.arange(24)[None] < jnp.array([[24], [0]])
    found = heads_and_gradients(lambda x: built(interpret=True)(x)[0], random_inputs(valid=valid, mask=Full()))
    assert all(np.isfinite(x).all() for x in found)
    assert not found[3][1].any()  # no key is valid, so none has a gradient


def test_gradients_of_packed_rows_with_softcap():
    ids = jnp.asarray(np.repeat([1, 2, 3], [5, 12, 7])[None].repeat(2, 0), jnp.int32)
    inputs = random_inputs(mask=Causal() & SameSegment() & SlidingWindow(size=4), softcap=5.0)
    tokens = dataclasses.replace(inputs.query, segment_ids=ids)
    inputs = inputs.replace(query=tokens, kv=dataclasses.replace(inputs.plain, tokens=tokens))
    found = heads_and_gradients(lambda x: built(interpret=True)(x)[0], inputs)
    assert_close(found, heads_and_gradients(reference, inputs))


@pytest.mark.slow
def test_ring_attention_equals_one_device():
    """Each hop calls `SplashKernel` and its `backward` on the parts that the device holds."""
    cfg = ax.pipe(tiny_model(), ax.use("splash", interpret=True))
    batch = jax.tree.map(np.asarray, tiny_batch(rows=2))
    rules = {"batch": "data", "seq": "context"}
    alone = Mesh(shape={"data": 1, "context": 1}, rules=rules)
    ring = Mesh(shape={"data": 2, "context": 4}, rules=rules, context=RingAttention.Config())
    one, eight = steps(cfg, batch, [alone, ring])
    np.testing.assert_allclose(eight["loss"], one["loss"], rtol=1e-5)
    for path, update in one["updates"].items():
        atol = 1e-6 + 1e-4 * np.abs(update).max()
        np.testing.assert_allclose(eight["updates"][path], update, rtol=0, atol=atol, err_msg=path)


def test_flops_leave_out_a_forward_pass_that_xla_removes():
    """With remat that keeps the heads and the lse, nothing uses the results of the recomputed forward kernel."""
    shape = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)

    def flops(wrap, fused=False):
        form = Form(scale=0.1, blocks=Blocks(fused_backward=fused))
        heads = wrap(lambda *x: attention(form, *x)[0])
        loss = jax.value_and_grad(lambda *x: heads(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))
        return count_flops(jax.make_jaxpr(loss)(shape, shape, shape)).total

    def keep(*names):
        return functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*names))

    product = 2 * 2 * 256 * 256 * 64  # of queries and keys
    assert flops(lambda fn: fn) == flops(keep("heads", "lse")) == (2 + 4 + 3) * product
    assert flops(lambda fn: fn, fused=True) == (2 + 5) * product
    assert flops(keep("heads")) == flops(keep()) == (2 + 2 + 4 + 3) * product
