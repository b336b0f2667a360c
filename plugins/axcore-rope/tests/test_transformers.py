"""Scalings, M-RoPE and ALiBi against recorded values of `transformers` (see record_transformers.py)."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.nn import TokenInfo
from axcore_rope.alibi import Alibi
from axcore_rope.published import from_rope_parameters
from axcore_rope.rotary import Rotary

HERE = pathlib.Path(__file__).parent
RECORDED = np.load(HERE / "transformers.npz")
DESCRIBED = json.loads((HERE / "transformers.json").read_text())
CASES, HEAD_DIM = DESCRIBED["cases"], DESCRIBED["head_dim"]


@pytest.mark.parametrize("length", [10, 100])
@pytest.mark.parametrize("name", CASES)
def test_rates_and_attention_factor(name, length):
    length_of_config = {"head_dim": HEAD_DIM, "max_position_embeddings": DESCRIBED["length"]}
    scaling = from_rope_parameters(CASES[name], theta=10_000.0, **length_of_config).scaling
    rates = jax.jit(lambda length: jnp.asarray(scaling.rates(10_000.0, HEAD_DIM, length)))(length)
    *expected, factor = RECORDED[f"{name}.{length}"]
    np.testing.assert_allclose(rates, expected, rtol=2e-6)
    assert scaling.attention_scaling == pytest.approx(factor, rel=1e-6)


def cos_and_sin(cfg, positions):
    """The cosines and sines of all pairs, read from a rotated query of ones and zeros."""
    rotary = cfg.set(head_dim=HEAD_DIM).build(rngs=ax.Rngs(0))
    q = np.zeros((positions.shape[0], positions.shape[1], 1, HEAD_DIM), np.float32)
    q[..., : HEAD_DIM // 2] = 1
    turned = np.asarray(rotary(q, None, positions, positions)[0])[:, :, 0]
    return turned[..., : HEAD_DIM // 2], turned[..., HEAD_DIM // 2 :]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mrope", {"mrope_section": [2, 3, 3]}),
        ("interleaved_mrope", {"mrope_section": [4, 2, 2], "mrope_interleaved": True}),
    ],
)
def test_mrope_rotates_each_pair_by_its_coordinate(name, fields):
    cfg = from_rope_parameters({"rope_type": "default", "rope_theta": 10_000.0, **fields}, head_dim=HEAD_DIM)
    positions = np.moveaxis(RECORDED["mrope.positions"], 0, -1).astype(np.int32)
    cos, sin = cos_and_sin(cfg, positions)
    np.testing.assert_allclose(cos, RECORDED[f"{name}.cos"][..., : HEAD_DIM // 2], atol=1e-5)
    np.testing.assert_allclose(sin, RECORDED[f"{name}.sin"][..., : HEAD_DIM // 2], atol=1e-5)


def test_sections_do_not_change_text():
    positions = np.arange(6, dtype=np.int32)[None]
    with_sections = cos_and_sin(Rotary.Config(sections=(2, 3, 3)), positions)
    np.testing.assert_array_equal(with_sections, cos_and_sin(Rotary.Config(), positions))


@pytest.mark.parametrize("scale", [1.0, 0.125])
@pytest.mark.parametrize("heads", [4, 6, 9])
def test_alibi_matches_bloom_up_to_a_constant_per_query(heads, scale):
    layer = Alibi.Config(num_heads=heads, scale=scale).build(rngs=ax.Rngs(0))
    tokens = TokenInfo.of(np.zeros((1, 5), np.int32))
    bias = np.asarray(layer(tokens, tokens))[0]
    last = bias[:, -1] - bias[:, -1, :1]  # BLOOM's biases are relative to the first key, which softmax ignores
    np.testing.assert_allclose(last, scale * RECORDED[f"alibi.{heads}"], rtol=1e-6, atol=1e-6)
