"""Every dispatch against the reference in NumPy float64."""

import sys

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import axcore as ax
from axcore.module import initializer
from axcore.nn import Blocks, FirstSupported, Linear, RaggedDot
from axcore.parallel import Mesh
from axcore_moe.dispatch import Capacity, Dense, Dropless
from axcore_moe.matmul import Tokamax
from axcore_moe.router import TopK

from .support import DIM, HIDDEN, call, compiled, expected, mixture, parameters, shapes, to_first, tokens

pytestmark = pytest.mark.long

SHAPES = [(1, 1, 1), (1, 5, 5), (7, 4, 2)]
"""(tokens, experts, choices of a token)."""
DISPATCHES = {
    "dense": Dense(),
    "dropless": Dropless(),
    "blocks of 3": Dropless(matmul=Blocks(size=3)),
    "ragged": Dropless(matmul=RaggedDot()),
    "capacity": Capacity(factor=5.0),
}


@pytest.mark.parametrize("dispatch", DISPATCHES.values(), ids=DISPATCHES)
@settings(deadline=None, max_examples=20, derandomize=True)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 2**16), even=st.booleans())
def test_output_matches_the_reference(dispatch, shape, seed, even):
    count, experts, top_k = shape
    cfg = mixture(experts, router=TopK.Config(top_k=top_k), dispatch=dispatch)
    params, x = parameters(cfg, seed), tokens(count, seed=seed)
    params = to_first(params) if even else params  # then all tokens go to the same experts
    np.testing.assert_allclose(call(cfg, params, x)[0], expected(params, x, top_k), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dispatch", DISPATCHES.values(), ids=DISPATCHES)
def test_gradient_matches_the_reference(dispatch):
    cfg = mixture(dispatch=dispatch)
    params, x = parameters(cfg), tokens(7)
    objective = jax.jit(
        jax.grad(lambda params, x: (compiled(cfg, False)(params, state, x, None)[0][0] ** 2).sum(), (0, 1))
    )
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes(cfg)[2])
    random, step = np.random.default_rng(1), 1e-6
    for found, at in zip(objective(params, x), range(2), strict=True):
        direction = jax.tree.map(lambda leaf: random.normal(size=leaf.shape), (params, x)[at])

        def moved(sign, direction=direction, at=at):
            args = [params, x]
            args[at] = jax.tree.map(
                lambda leaf, way: np.asarray(leaf, np.float64) + sign * step * way, args[at], direction
            )
            return np.square(expected(*args, 2)).sum()

        slope = sum(jax.tree.leaves(jax.tree.map(lambda grad, way: (grad * way).sum(), found, direction)))
        np.testing.assert_allclose(slope, (moved(1) - moved(-1)) / (2 * step), rtol=1e-3)


def test_pairs_over_capacity_are_dropped_and_counted():
    cfg = mixture(router=TopK.Config(top_k=1), dispatch=Capacity(factor=1.0))
    params, x = to_first(parameters(cfg)), tokens(8)
    out, collections, _ = call(cfg, params, x, training=True)
    np.testing.assert_allclose(out[:, :2], expected(params, x, 1)[:, :2], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(out[:, 2:], 0)  # 8 tokens choose one expert, which has a capacity of 2
    assert collections.scalars()["dropped"] == pytest.approx(0.75)


def test_second_choices_are_dropped_before_first_choices():
    cfg = mixture(2, router=TopK.Config(top_k=2, normalize=False), dispatch=Capacity(factor=0.5))
    params, x = parameters(cfg), tokens(2)
    params["router"]["linear"]["weight"] = np.linalg.pinv(
        x[0]
    )  # each token prefers a different expert, with a logit of 1
    likes = np.eye(2)
    first = np.exp(likes.max(axis=1)) / np.exp(likes).sum(axis=1)
    out = call(cfg, params, x)[0]
    np.testing.assert_allclose(out, first[:, None] * expected(params, x, 1), rtol=1e-4, atol=1e-5)


def test_adapters_without_group_support_are_rejected():
    cfg = ax.select(mixture(), "experts.block.up").set(adapter=Linear.Config())
    with pytest.raises(ax.ConfigError, match=r"experts\.up: adapter=.* has no field 'groups'"):
        shapes(cfg)


def test_experts_without_hidden_dim_are_rejected():
    with pytest.raises(ax.ConfigError, match=r"block\.hidden_dim is REQUIRED\. Set it to the hidden features"):
        shapes(ax.select(mixture(), "experts.block").set(hidden_dim=ax.REQUIRED))


def test_expert_init_uses_the_fan_in_of_one_expert():
    up = jax.jit(initializer(mixture(64)))(jax.random.key(0))[0]["experts"]["up"]["weight"]
    assert up.shape == (64, DIM, HIDDEN)
    np.testing.assert_allclose(np.std(up), DIM**-0.5, rtol=0.1)  # the fan-in is DIM, not 64 * DIM
    assert not np.allclose(up[0], up[1])


def test_missing_tokamax_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    cfg = mixture(dispatch=Dropless(matmul=Tokamax()))
    with pytest.raises(
        ax.ConfigError, match=r"dispatch\.matmul: .* Tokamax: requires the package tokamax \(pip install tokamax\)"
    ):
        call(cfg, parameters(cfg), tokens(3))


class NoRows(Blocks):
    def supports(self, request):
        return f"multiplies no {request.dtype} rows"


def test_the_first_supported_grouped_product_of_an_order_is_used():
    cfg = mixture(dispatch=Dropless(matmul=FirstSupported(order=(NoRows(), Blocks(size=3)))))
    params, x = parameters(cfg), tokens(7)
    found = call(cfg, params, x)[0]
    np.testing.assert_array_equal(found, call(mixture(dispatch=DISPATCHES["blocks of 3"]), params, x)[0])
    nested = FirstSupported(order=(FirstSupported(order=(NoRows(),)), Blocks(size=3)))
    np.testing.assert_array_equal(found, call(mixture(dispatch=Dropless(matmul=nested)), params, x)[0])
    for order in ((NoRows(),), ()):
        cfg = mixture(dispatch=Dropless(matmul=FirstSupported(order=order)))
        reason = "NoRows: multiplies no float32 rows" if order else "order is empty"
        with pytest.raises(ax.ConfigError, match=rf"^dispatch\.matmul: no grouped product .*{reason}\. Use Blocks"):
            call(cfg, params, x)


def test_the_backward_pass_keeps_tokens_instead_of_their_rows():
    """Each token has `top_k` rows, and the rows of a group are padded. Only gate, up and hidden features are kept."""
    cfg = mixture(8, router=TopK.Config(top_k=4), dispatch=Dropless(matmul=Blocks(size=8)))
    params, x = parameters(cfg), tokens(64)
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes(cfg)[2])
    kept = jax.eval_shape(lambda x: jax.vjp(lambda x: compiled(cfg, False)(params, state, x, None)[0][0], x)[1], x)
    rows = 64 * 4 + 8 * 8
    sizes = [leaf.shape for leaf in jax.tree.leaves(kept)]
    assert (rows, HIDDEN) in sizes
    assert not [shape for shape in sizes if shape[-1:] == (DIM,) and np.prod(shape) >= 64 * 4 * DIM]


@pytest.mark.parametrize("dispatch", [Dropless(), Capacity()], ids=["dropless", "capacity"])
def test_a_pipeline_stage_with_two_further_axes_raises(dispatch):
    stage = Mesh(shape={"pipeline": 2, "fsdp": 2, "tensor": 2}).abstract(8, "cpu").inside({"pipeline"})
    with (
        stage.active(),
        pytest.raises(ax.ConfigError, match=r"has fsdp=2 and tensor=2. Use dispatch=Exchange"),
    ):
        dispatch(None, None, None)
