"""The features of the core that edit a model."""

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.config import walk
from axcore.module import functional
from axcore.nn import Attention, FullWidthNorm, Linear, RMSNorm, SlidingWindow, layers_of
from axcore.testing import FeatureSuite, tiny_batch, tiny_model

pytestmark = pytest.mark.long


@pytest.mark.slow
class TestDropout(FeatureSuite):
    feature = "dropout"
    options = {"rate": 0.1}


class TestFusedQkv(FeatureSuite):
    feature = "fused-qkv"
    replaces = tuple(f"decoder.*.attention.{name}.weight" for name in ("query", "key", "value"))


class TestQkNorm(FeatureSuite):
    feature = "qk-norm"


@pytest.mark.slow
class TestSlidingWindow(FeatureSuite):
    feature = "sliding-window"
    options = {"size": 3}


def windows(cfg):
    masks = [place.config.attention.mask.masks for place in layers_of(cfg.decoder)]
    return [any(isinstance(mask, SlidingWindow) for mask in each) for each in masks]


@pytest.mark.parametrize(("depth", "every"), [(6, 2), (7, 3), (4, 4), (3, 5)])
def test_the_last_layer_of_each_group_is_global(depth, every):
    cfg = ax.select(tiny_model(), "decoder").set(num_layers=depth)
    found = windows(ax.pipe(cfg, ax.use("sliding-window", size=2, global_every=every)))
    assert found == [number % every != every - 1 for number in range(depth)]


def test_without_global_layers_the_stack_stays_one_scan():
    cfg = ax.pipe(tiny_model(), ax.use("sliding-window", size=2))
    assert windows(cfg) == [True, True] and cfg.decoder.num_layers == 2


def test_the_columns_of_a_fused_projection_are_grouped_by_kv_head():
    cfg = tiny_model()
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    fused, _, _ = functional(ax.pipe(cfg, ax.use("fused-qkv")).build(rngs=ax.Rngs(0)))
    ids = tiny_batch()["inputs"]
    expected = fn(params, state, ids)[0][0]
    attention = params["decoder"]["layers"]["attention"]
    heads = {
        name: np.asarray(attention.pop(name)["weight"]).reshape(2, 16, -1, 4) for name in ("query", "key", "value")
    }
    groups = [
        np.concatenate(
            [heads["query"][:, :, 2 * kv : 2 * kv + 2], heads["key"][:, :, [kv]], heads["value"][:, :, [kv]]], 2
        )
        for kv in range(2)
    ]
    attention["qkv"] = {"weight": jax.numpy.asarray(np.concatenate(groups, axis=2).reshape(2, 16, -1))}
    np.testing.assert_allclose(fused(params, state, ids)[0][0], expected, rtol=1e-5, atol=1e-6)


def test_unequal_projections_are_not_fused():
    cfg = ax.select(tiny_model(), "**.key").set(use_bias=True)
    with pytest.raises(
        ax.ConfigError, match=r"at decoder.layers.attention: query, key and value must be set and equal"
    ):
        ax.pipe(cfg, ax.use("fused-qkv"))
    with pytest.raises(ax.ConfigError, match="qkv is already set"):
        ax.pipe(tiny_model(), ax.use("fused-qkv"), ax.use("fused-qkv"))


def test_norms_act_on_each_head_or_on_all_heads():
    cfg = ax.pipe(tiny_model(), ax.use("qk-norm", eps=1e-5))
    assert cfg.decoder.layers.attention.key_norm == RMSNorm.Config(eps=1e-5)
    wide = ax.pipe(tiny_model(), ax.use("qk-norm", full_width=True)).decoder.layers.attention
    assert isinstance(wide.query_norm, FullWidthNorm.Config)
    assert ax.select(wide, Linear) and isinstance(wide, Attention.Config)


def test_use_dropout_sets_every_rate_and_checks_it():
    cfg = ax.pipe(tiny_model(), ax.use("dropout", rate=0.25))
    rates = {type(node).target.__name__: node.dropout for _, node in walk(cfg) if hasattr(node, "dropout")}
    assert rates == dict.fromkeys(("CausalLM", "TransformerLayer", "Attention", "FeedForward"), 0.25)
    with pytest.raises(ax.ConfigError, match=r"dropout must be at least 0 and below 1, not 1\.0"):
        ax.pipe(tiny_model(), ax.use("dropout", rate=1.0)).build(rngs=ax.Rngs(0))
