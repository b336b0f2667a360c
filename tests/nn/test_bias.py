"""The bias slot of attention, and kernels that do not support it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.nn import (
    Attention,
    AttentionKernel,
    ChooseKernel,
    FeedForward,
    KernelRequest,
    Normal,
    ReferenceKernel,
    TokenInfo,
    TransformerLayer,
    refusal,
)
from axcore.nn.choosing import recording

from . import reference
from .support import call, decoded, inputs, parameters, shapes, wide

BATCH, SEQ, HEADS, KV_HEADS, DIM = 2, 7, 4, 2, 8
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 0, 1]], np.int32)
PACKED = TokenInfo(np.arange(SEQ, dtype=np.int32)[None], POSITIONS, SEGMENTS)
X = np.random.default_rng(3).normal(size=(BATCH, SEQ, DIM)).astype(np.float32)


class Relative(ax.Layer):
    """A learned logit for each head and each distance of positions."""

    class Config(ax.Layer.Config):
        num_heads: int = ax.REQUIRED
        num_kv_heads: int = ax.REQUIRED
        head_dim: int = ax.REQUIRED
        input_dim: int = ax.REQUIRED
        reach: int = SEQ

    def __init__(self, cfg, *, rngs):
        shape = (cfg.num_heads, cfg.reach)
        self.weight = self.param("weight", shape, Normal(stddev=1.0), rngs, axes=("head", None))

    def __call__(self, query, key):
        distance = jnp.abs(query.positions[:, :, None] - key.positions[:, None, :])
        return jnp.moveaxis(self.weight[...][:, distance], 0, 1).astype(jnp.float32)


def attention(chunk=None, **changes):
    kernel = ReferenceKernel.Config(chunk=chunk)
    return Attention.Config(
        **{"input_dim": DIM, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "bias": Relative.Config(), "kernel": kernel}
        | changes
    )


def by_formula(params, softcap=None, sinks=None):
    p, x = wide(params), X.astype(np.float64)
    q, k, v = ((x @ p[name]["weight"]).reshape(BATCH, SEQ, -1, 2) for name in ("query", "key", "value"))
    distance = np.abs(POSITIONS[:, :, None] - POSITIONS[:, None, :])
    bias = np.moveaxis(p["bias"]["weight"][:, distance], 0, 1)
    out = reference.attend(q, k, v, reference.causal(BATCH, SEQ, SEGMENTS), softcap=softcap, bias=bias, sinks=sinks)
    return out.reshape(BATCH, SEQ, -1) @ p["projection"]["weight"]


@pytest.mark.parametrize("chunk", [None, 3, 1], ids="chunks of {}".format)
def test_the_bias_is_added_to_the_logits_for_every_chunk_size(chunk):
    cfg = attention(chunk)
    params = parameters(cfg)
    assert params["bias"]["weight"].shape == (HEADS, SEQ)
    np.testing.assert_allclose(call(cfg, params, X, PACKED)[0], by_formula(params), rtol=1e-4, atol=1e-5)


def test_the_bias_is_added_after_the_softcap_and_with_sinks():
    cfg = attention(3, softcap=0.7, sinks=Normal(stddev=1.0))
    params = parameters(cfg)
    expected = by_formula(params, softcap=0.7, sinks=wide(params)["sinks"])
    np.testing.assert_allclose(call(cfg, params, X, PACKED)[0], expected, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_the_bias_does_not_depend_on_the_chunk_size():
    cfg, chunked = attention(), attention(3)
    params = parameters(cfg)

    def slope(cfg):
        fn = shapes(cfg)[0]
        return jax.jit(jax.grad(lambda params: jnp.sum(jnp.square(fn(params, {}, X, PACKED)[0][0]))))(params)

    expected, found = slope(cfg), slope(chunked)
    assert np.abs(expected["bias"]["weight"]).max() > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_the_bias_receives_the_positions_of_cached_keys():
    cfg = attention()
    params = parameters(cfg)
    found = decoded(cfg, params, X, PACKED, ((0, 4), (4, 5), (5, 7)), max_len=9)
    np.testing.assert_allclose(found, by_formula(params), rtol=1e-4, atol=1e-5)


class Plain(AttentionKernel):
    """A kernel that takes no option."""

    def __call__(self, inputs):
        return inputs.q, None


class Local(ReferenceKernel):
    """A kernel that takes a bias and runs on the heads of one device."""

    local = True


def test_a_kernel_without_bias_support_raises_with_the_path():
    layer = TransformerLayer.Config(
        input_dim=DIM, attention=attention(kernel=Plain.Config()), ffn=FeedForward.Config(hidden_dim=4)
    )
    params = parameters(layer.set(attention=attention()))
    with pytest.raises(
        ax.ConfigError, match=r"attention\.kernel: no kernel supports the call .*Plain: does not take bias"
    ):
        call(layer, params, X, PACKED)


def test_a_kernel_that_supports_the_bias_is_chosen():
    order = (Plain.Config(), Local.Config(), ReferenceKernel.Config())
    cfg = attention(kernel=ChooseKernel.Config(order=order))
    params = parameters(cfg)
    with recording() as choices:
        jax.eval_shape(shapes(cfg)[0], params, {}, X, PACKED)
    assert [(type(choice.chosen), [type(kernel) for kernel, _ in choice.refused]) for choice in choices] == [
        (Local, [Plain])
    ]
    np.testing.assert_allclose(call(cfg, params, X, PACKED)[0], by_formula(params), rtol=1e-4, atol=1e-5)


def test_kernels_support_calls_without_options():
    q, mask = jnp.zeros((1, 2, 2, 4)), Attention.Config().mask
    tokens = TokenInfo.of(jnp.zeros((1, 2), jnp.int32))
    plain, biased = (
        KernelRequest.of(inputs(q, q, q, mask, tokens, tokens, bias=bias)) for bias in (None, lambda query, key: 0.0)
    )
    for kernel, refused in ((Plain, "does not take bias"), (Local, None)):
        made = kernel.Config(head_dim=4).build(rngs=ax.Rngs(0))
        assert refusal(made, plain) is None
        assert refusal(made, biased) == refused
