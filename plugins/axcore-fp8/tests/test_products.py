"""Products and gradients of a linear map with FP8, their errors, overflow and remat."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import axcore as ax
from axcore.module import invoke
from axcore.nn import Batched, Blocks, Grouped, Linear, Plain, Transposed
from axcore.numerics import stored
from axcore.parallel import ByTag, Mesh, Remat
from axcore_fp8 import products
from axcore_fp8.fp8 import Fp8
from axcore_fp8.quantize import E4M3, E5M2, amax_of, quantize, scale_of
from axcore_fp8.training import TAGS, Form, fp8_product

from .support import linear

K = 512
GAUSSIAN = {"out": (0.030, 0.040), "dx": (0.045, 0.060), "dw": (0.045, 0.061)}
"""Relative errors of per-tensor scaling: E4M3 forward, E5M2 gradients."""


def error(found, exact):
    return np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def quantized(x, dtype):
    return quantize(x, dtype, scale_of(amax_of(x), dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_errors_are_those_of_the_formats(dtype):
    x, w, g = normal(0, 256, K), normal(1, K, 384), normal(2, 256, 384)
    form = Form("current", jnp.dtype(dtype), jnp.dtype("float32"), jnp.dtype(dtype))

    @jax.jit
    def run(x, w, g):
        y, pull = jax.vjp(lambda x, w: fp8_product(form, x, w, None, Plain())[0], x.astype(dtype), w)
        return y, *pull(g.astype(dtype))

    y, dx, dw = run(x, w, g)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, jnp.float32)
    x, w, g = (np.asarray(each, np.float64) for each in (x, w, g))
    for name, found, exact in (("out", y, x @ w), ("dx", dx, g @ w.T), ("dw", dw, x.T @ g)):
        low, high = GAUSSIAN[name]
        assert low < error(found, exact) < high, (name, error(found, exact))


CASES = {
    "linear": (Plain(), (2, 12, 16), (16, 24), (2, 12, 24)),
    "tied head": (Transposed(), (2, 12, 16), (24, 16), (2, 12, 24)),
    "batched": (Batched(), (3, 8, 16), (3, 16, 24), (3, 8, 24)),
    "blocks": (
        Grouped(jnp.asarray([8, 0, 16]), jnp.asarray([0, 2, 2]), 24, Blocks(size=8)),
        (24, 16),
        (3, 16, 24),
        (24, 24),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_products_of_codes_equal_products_of_dequantized_numbers(name):
    """To the rounding of float32 sums: codes and scales are exact."""
    product, of_x, of_w, of_g = CASES[name]
    x, w, g = (
        quantized(normal(i, *shape), dtype)
        for i, (shape, dtype) in enumerate(((of_x, E4M3), (of_w, E4M3), (of_g, E5M2)))
    )
    assert products._has_fp8_products(product, x, w)
    f32 = jnp.float32
    wide = [each.dequantized(f32) for each in (x, w, g)]
    y, pull = jax.vjp(product, *wide[:2])
    found = (products.forward(product, x, w, f32, f32), *products.backward(product, x, w, g, (f32, f32, f32)))
    for mine, theirs in zip(found, (y, *pull(wide[2])), strict=True):
        assert mine.shape == theirs.shape
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def operands(jaxpr):
    """The dtypes of the operands of each product in a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield tuple(str(each.aval.dtype) for each in eqn.invars)
        for inner in jaxprs_in_params(eqn.params):
            yield from operands(inner)


def test_no_product_has_two_operands_of_e5m2():
    """XLA would multiply them in bfloat16."""
    fn, params, state = linear(16, 32, "bfloat16")
    x = jnp.ones((4, 16), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(jax.grad(lambda p, x: fn(p, state, x)[0][0].astype(jnp.float32).sum(), argnums=(0, 1)))
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    assert sorted(operands(jaxpr(params, x).jaxpr)) == [(e4m3, e4m3), (e4m3, e5m2), (e5m2, e4m3)]


@pytest.mark.parametrize("scaling", ["current", "delayed", "block"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_number_that_is_not_finite_is_counted_and_not_masked(scaling, bad):
    fn, params, state = linear(16, 8, scaling=scaling)
    x = jnp.ones((4, 16)).at[1, 3].set(bad)
    y, collections = invoke(fn.bind(params, state), x)
    assert not np.isfinite(y[1]).any()
    counts = {path: float(each.value) for path, each in collections.summaries.items() if path.endswith(".overflow")}
    assert counts == {"numerics.overflow": 1.0}
    _, collections = invoke(fn.bind(params, state), jnp.ones((4, 16)))
    assert float(collections.summaries["numerics.overflow"].value) == 0


def saved(remat):
    """dtypes of what the backward pass of two FP8 linear maps keeps, other than arguments."""
    from jax._src.ad_checkpoint import saved_residuals

    fn, params, state = linear(16, 16)

    def two(x):
        once = jax.checkpoint(lambda x: jnp.sin(fn(params, state, x)[0][0]).sum(), policy=remat.policy())
        return once(jnp.cos(x))

    return [str(aval.dtype) for aval, source in saved_residuals(two, jnp.ones((4, 16))) if aval.shape == (4, 16)]


def test_remat_keeps_codes_by_tag():
    assert "uint8" not in saved(Remat())
    assert "uint8" in saved(ByTag(save=("fp8_input",)))


@pytest.mark.parametrize("tag", TAGS)
def test_gradients_do_not_change_with_saved_codes(tag):
    """`jax.checkpoint` would turn E4M3 numbers from 256 on into NaN."""
    fn, params, state = linear(16, 16)
    x = jnp.asarray(normal(0, 32, 16))

    def gradients(policy):
        call = jax.checkpoint(lambda params, x: fn(params, state, jnp.sin(x))[0][0], policy=policy)
        return jax.jit(jax.grad(lambda params, x: jnp.square(call(params, x)).sum(), argnums=(0, 1)))(params, x)

    found, expected = gradients(ByTag(save=(tag,)).policy()), gradients(None)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("kind", "works"),
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H200", True),
        ("NVIDIA L4", True),
        ("NVIDIA L40S", True),
        ("NVIDIA B200", True),
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA A10G", False),
        ("Tesla V100-SXM2-16GB", False),
        ("Tesla T4", False),
        ("TPU v5 lite", False),
        ("TPU v6 lite", False),
        ("TPU7x", True),
    ],
)
def test_hardware_without_fp8_raises(kind, works):
    fn, params, state = linear(16, 8)
    stored_fn, codes, _ = linear(16, 8, weight_only=True)
    layout = Mesh(shape={"data": 1}, rules={}).abstract(1, "tpu" if "TPU" in kind else "gpu", kind)
    x = jnp.ones((4, 16))
    with layout.active():
        jax.eval_shape(lambda p: stored_fn(p, {}, x)[0][0], codes)
        if works:
            jax.eval_shape(lambda p: fn(p, state, x)[0][0], params)
            return
        with pytest.raises(ax.ConfigError, match=rf"^numerics: {kind} devices do not multiply FP8.*weight_only=True"):
            jax.eval_shape(lambda p: fn(p, state, x)[0][0], params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amax_history_len": 3}, "amax_history_len=3 has no effect with scaling='current'"),
        ({"scaling": "block", "weight_only": True}, "scaling='block' has no effect with weight_only=True"),
    ],
    ids=str,
)
def test_options_without_effect_raise(options, message):
    with pytest.raises(ax.ConfigError, match=message):
        linear(16, 8, **options)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-36, 1e-39])
def test_tiny_gradients_become_zero_instead_of_nan(magnitude):
    fn, params, state = linear(16, 8)
    x, g = normal(0, 4, 16), magnitude * normal(1, 4, 8)
    loss = lambda params, x: (fn(params, state, x)[0][0] * g).sum()  # noqa: E731
    of_params, of_x = jax.grad(loss, (0, 1))(params, jnp.asarray(x))
    exact = x.T.astype(np.float64) @ g
    if magnitude == 1e-30:
        assert error(of_params["weight"], exact) < 0.1
    assert np.isfinite(of_params["weight"]).all() and np.isfinite(of_x).all()
    assert np.abs(of_params["weight"]).max() < 2 * np.abs(exact).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_stored_weights_pass_the_gradient_to_their_input(dtype):
    """Adapters of earlier layers are trained with it. In float16, gradients times scales would underflow."""
    cfg = Linear.Config(input_dim=64, output_dim=32, numerics=Fp8.Config(), dtypes=ax.DTypes(compute=dtype))
    _, params, state = ax.functional(cfg.build(rngs=ax.Rngs(0)))
    weight = np.asarray(params["weight"], np.float64)
    cfg, params = stored(cfg, params)
    fn = ax.functional(cfg.build(rngs=ax.Rngs(0)))[0]
    x, g = jnp.asarray(normal(0, 4, 64), dtype), 1e-4 * normal(1, 4, 32)
    found = jax.grad(lambda x: (fn(params, state, x)[0][0].astype(jnp.float32) * g).sum())(x)
    assert found.dtype == dtype
    assert 0.01 < error(found, g.astype(np.float64) @ weight.T) < 0.04
