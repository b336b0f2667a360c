"""Joining the weights of products of one input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.module import abstract, functional
from axcore.nn import Attention, ContiguousCache, FeedForward, Linear, fused
from axcore.numerics import stored
from axcore.testing import tiny_batch, tiny_model

IDS = tiny_batch()["inputs"]


def outputs(cfg, params, state):
    return functional(cfg.build(rngs=ax.Rngs(0)))[0](params, state, IDS)[0][0]


def paths(params):
    return {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(params)}


@pytest.mark.long
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("numerics", [None, "int8", "int4"])
def test_a_fused_model_computes_the_same(bias, numerics):
    cfg = ax.select(tiny_model(), Linear).set(use_bias=bias)
    params, state = functional(cfg.build(rngs=ax.Rngs(0)))[1:]
    params = jax.tree.map(lambda each: each + 0.1 * jax.random.normal(jax.random.key(1), each.shape), params)
    if numerics is not None:
        options = {"activation_scales": None} if numerics == "int8" else {}
        cfg, params = stored(ax.use(numerics, **options)(cfg), params)
    made, joined = fused(cfg, params, state)
    names = paths(joined)
    assert any("attention.qkv" in name for name in names) and any("ffn.gate_up" in name for name in names)
    assert not any(part in name for name in names for part in ("query", "key.", "value", "ffn.gate.", "ffn.up."))
    assert sum(leaf.size for leaf in jax.tree.leaves(joined)) == sum(leaf.size for leaf in jax.tree.leaves(params))
    np.testing.assert_allclose(outputs(made, joined, state), outputs(cfg, params, state), rtol=1e-5, atol=1e-5)
    shapes = abstract(made)[1]
    assert jax.tree.map(lambda each: (each.shape, each.dtype), joined) == jax.tree.map(
        lambda each: (each.shape, each.dtype), shapes
    )


@pytest.mark.parametrize(
    "edit",
    [
        lambda cfg: ax.use("lora", rank=2)(cfg),
        lambda cfg: ax.use("int8", where="decoder.**", activation_scales=None)(cfg),  # rounds in each call
        lambda cfg: ax.select(cfg, lambda path, _: path.endswith((".key", ".up"))).set(use_bias=True),
    ],
    ids=["adapters", "float weights with numerics", "unequal maps"],
)
def test_other_maps_stay_apart(edit):
    cfg = edit(tiny_model())
    _, params, state = abstract(cfg)
    made, same = fused(cfg, params, state)
    assert made == cfg and paths(same) == paths(params)


def test_one_scale_for_the_whole_weight_stays_apart():
    cfg = tiny_model()
    _, params, state = abstract(cfg)
    attention = params["decoder"]["layers"]["attention"]
    for name in ("query", "key", "value"):
        attention[name]["scale"] = jax.ShapeDtypeStruct((2, 1, 1), jnp.float32)
    made, joined = fused(cfg, params, state)
    names = paths(joined)
    assert made.decoder.layers.attention.qkv is None and any("attention.query" in name for name in names)
    assert made.decoder.layers.ffn.gate_up is not None


def test_gate_and_up_exclude_the_fused_projection():
    block = FeedForward.Config(input_dim=4, hidden_dim=8, dtypes=ax.DTypes())
    for cfg, message in (
        (block.set(gate_up=Linear.Config()), "set gate and up to None"),
        (block.set(gate=None, up=None), "up and gate_up are both None"),
    ):
        with pytest.raises(ax.ConfigError, match=message):
            cfg.build(rngs=ax.Rngs(0))
    assert block.set(gate=None).fusion() is None and Attention.Config(num_heads=2, query=None).fusion() is None


@pytest.mark.long
def test_decoders_of_one_device_are_fused():
    model = tiny_model().build(rngs=ax.Rngs(0))
    sizes = {"cache": ContiguousCache.Config(), "batch_size": 2, "max_len": 8}
    step, logits = Step(jnp.ones((2, 3), jnp.int32), start=jnp.zeros((2,), jnp.int32)), []
    for fuse in (True, False):
        decoder, params, state = Decoder.of(model, **sizes, fuse=fuse)
        shapes = Decoder.abstract(tiny_model(), **sizes, fuse=fuse)[1]
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda each: each.shape, shapes)
        assert any("qkv" in path for path in paths(params)) == fuse
        logits.append(decoder(params, state, step)[0])
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-5)
