"""The projections of attention: fused or separate, with biases, and norms and scales of heads."""

import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import Attention, FullWidthNorm, LayerNorm, Linear, RMSNorm, Scale, TokenInfo, TransformerLayer

from . import reference
from .support import call, parameters, wide

BATCH, SEQ, DIM, HEADS, HEAD_DIM = 2, 5, 6, 4, 3
X = np.random.default_rng(3).normal(size=(BATCH, SEQ, DIM)).astype(np.float32)
TOKENS = TokenInfo(np.arange(SEQ, dtype=np.int32)[None], np.arange(SEQ, dtype=np.int32)[None])
APART = {"query": None, "key": None, "value": None}


def attention(kv_heads=2, **changes):
    return Attention.Config(input_dim=DIM, num_heads=HEADS, num_kv_heads=kv_heads, head_dim=HEAD_DIM, **changes)


def grouped(params, kv_heads, name):
    """Fuses three weights (or biases). The columns are grouped by kv head: queries, key, value."""
    heads = {
        each: params[each][name].reshape(*params[each][name].shape[:-1], -1, HEAD_DIM)
        for each in ("query", "key", "value")
    }
    group = HEADS // kv_heads
    columns = []
    for kv in range(kv_heads):
        columns += [heads["query"][..., kv * group + i, :] for i in range(group)]
        columns += [heads["key"][..., kv, :], heads["value"][..., kv, :]]
    return np.concatenate(columns, axis=-1)


@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids="{} kv heads".format)
def test_fused_qkv_equals_three_projections(kv_heads):
    apart = Linear.Config(use_bias=True)
    cfg = attention(kv_heads, query=apart, key=apart, value=apart)
    params = parameters(cfg)
    fused = attention(kv_heads, **APART, qkv=apart)
    qkv = {name: grouped(params, kv_heads, name) for name in ("weight", "bias")}
    assert {name: shape.shape for name, shape in abstract(fused)[1]["qkv"].items()} == {
        name: value.shape for name, value in qkv.items()
    }
    found, _ = call(fused, {"qkv": qkv, "projection": params["projection"]}, X, TOKENS)
    np.testing.assert_allclose(found, call(cfg, params, X, TOKENS)[0], rtol=1e-5, atol=1e-6)


def test_a_fused_projection_is_sharded_by_heads():
    assert abstract(attention(**APART, qkv=Linear.Config()))[0].axes["qkv"]["weight"] == ("embed", "kv_head")


def by_formula(cfg, params, kv_heads, query_norm, key_norm):
    p, x = wide(params), X.astype(np.float64)

    def heads(name, count):
        return (x @ p[name]["weight"]).reshape(BATCH, SEQ, count, HEAD_DIM)

    q, k = query_norm(heads("query", HEADS)), key_norm(heads("key", kv_heads))
    out = reference.attend(q, k, heads("value", kv_heads), reference.causal(BATCH, SEQ), cfg.scale, cfg.softcap)
    return out.reshape(BATCH, SEQ, -1) @ p["projection"]["weight"]


def test_each_head_of_queries_and_keys_is_normalized_separately():
    cfg = attention(query_norm=RMSNorm.Config(eps=1e-2), key_norm=LayerNorm.Config(), softcap=2.0, scale=1.5)
    params = parameters(cfg)
    p = wide(params)
    assert p["query_norm"]["scale"].shape == p["key_norm"]["scale"].shape == (HEAD_DIM,)
    expected = by_formula(
        cfg,
        params,
        2,
        lambda q: reference.rms_norm(q, p["query_norm"]["scale"], 1e-2),
        lambda k: reference.layer_norm(k, p["key_norm"]["scale"], p["key_norm"]["bias"]),
    )
    np.testing.assert_allclose(call(cfg, params, X, TOKENS)[0], expected, rtol=1e-4, atol=1e-5)
    assert abstract(cfg)[0].axes["query_norm"]["scale"] == (None,)


def test_full_width_norm_normalizes_all_heads_as_one_vector():
    cfg = attention(query_norm=FullWidthNorm.Config(), key_norm=FullWidthNorm.Config())
    params = parameters(cfg)
    p = wide(params)
    assert p["query_norm"]["norm"]["scale"].shape == (HEADS * HEAD_DIM,)
    assert p["key_norm"]["norm"]["scale"].shape == (2 * HEAD_DIM,)

    def across(name):
        return lambda x: reference.rms_norm(x.reshape(BATCH, SEQ, -1), p[name]["norm"]["scale"]).reshape(x.shape)

    expected = by_formula(cfg, params, 2, across("query_norm"), across("key_norm"))
    np.testing.assert_allclose(call(cfg, params, X, TOKENS)[0], expected, rtol=1e-4, atol=1e-5)


def test_a_query_scale_is_learned():
    cfg = attention(query_norm=Scale.Config(), scale=1.0)
    params = parameters(cfg)
    scale = wide(params)["query_norm"]["scale"]
    expected = by_formula(cfg, params, 2, lambda q: q * scale, lambda k: k)
    np.testing.assert_allclose(call(cfg, params, X, TOKENS)[0], expected, rtol=1e-4, atol=1e-5)


class Move(ax.Layer):
    """A position embedding that adds positions to queries and keys."""

    def __call__(self, q, k, query_positions, key_positions):
        return q + query_positions[:, :, None, None], k + key_positions[:, :, None, None]


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_heads_are_normalized_before_the_position_embedding(fused):
    norm = RMSNorm.Config()
    changes = {**APART, "qkv": Linear.Config()} if fused else {}
    cfg = attention(4, query_norm=norm, key_norm=norm, position=Move.Config(), **changes)
    params = parameters(cfg)
    if fused:
        shape = (DIM, HEADS, 3, HEAD_DIM)
        parts = np.moveaxis(params["qkv"]["weight"].reshape(shape), 2, 0).reshape(3, DIM, -1)
        apart = {name: {"weight": part} for name, part in zip(("query", "key", "value"), parts, strict=True)}
    else:
        apart = params
    p = wide(params)
    steps = np.arange(SEQ)[None, :, None, None]
    expected = by_formula(
        cfg,
        {**params, **apart},
        4,
        lambda q: reference.rms_norm(q, p["query_norm"]["scale"]) + steps,
        lambda k: reference.rms_norm(k, p["key_norm"]["scale"]) + steps,
    )
    np.testing.assert_allclose(call(cfg, params, X, TOKENS)[0], expected, rtol=1e-4, atol=1e-5)


LINEAR = Linear.Config()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"qkv": LINEAR}, "qkv computes queries, keys and values in one product; set query, key, value to None"),
        ({"qkv": LINEAR, "key": None, "value": None}, "set query to None"),
        (APART, "query and qkv are both None; set query, or set qkv"),
        ({"key": None}, "key and value must both be set"),
        ({"query": None}, "query and qkv are both None"),
    ],
)
def test_incomplete_projections_raise_with_their_path(changes, told):
    layer = TransformerLayer.Config(input_dim=DIM, attention=attention(**changes))
    with pytest.raises(ax.ConfigError, match=rf"layers\.attention: .*{told}"):
        abstract(layer, "layers")
