"""Feed-forward blocks other than SwiGLU: without a gate, and with other gatings."""

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import ClampedSwiGLU, FeedForward, Gating, Linear, TransformerLayer, combined, squared_relu

from .support import call, parameters, wide

X = 3 * np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
BIASED = Linear.Config(use_bias=True)


def products(params):
    p, x = wide(params), X.astype(np.float64)
    return {name: x @ p[name]["weight"] + p[name].get("bias", 0.0) for name in ("gate", "up") if name in p}


def down(params, hidden):
    p = wide(params)["down"]
    return hidden @ p["weight"] + p.get("bias", 0.0)


@pytest.mark.parametrize(("activation", "power"), [(jax.nn.relu, 1), (squared_relu, 2)])
@pytest.mark.parametrize("linear", [Linear.Config(), BIASED], ids=["without biases", "with biases"])
def test_case_squared_relu_without_a_gate(linear, activation, power):
    cfg = FeedForward.Config(input_dim=4, hidden_dim=6, gate=None, up=linear, down=linear, activation=activation)
    params = parameters(cfg)
    assert set(params) == {"up", "down"}
    expected = down(params, np.maximum(products(params)["up"], 0) ** power)
    np.testing.assert_allclose(call(cfg, params, X)[0], expected, rtol=1e-5, atol=1e-5)


def test_clamped_swiglu_follows_its_formula_inside_and_outside_the_limits():
    cfg = FeedForward.Config(
        input_dim=4, hidden_dim=6, gating=ClampedSwiGLU(alpha=1.702, limit=1.0), gate=BIASED, up=BIASED, down=BIASED
    )
    params = parameters(cfg, scale=1.0)
    made = products(params)
    assert all((np.abs(each) > 1).any() and (np.abs(each) < 1).any() for each in made.values())
    gate, up = np.minimum(made["gate"], 1.0), np.clip(made["up"], -1.0, 1.0)
    expected = down(params, (up + 1) * gate / (1 + np.exp(-1.702 * gate)))
    np.testing.assert_allclose(call(cfg, params, X)[0], expected, rtol=1e-4, atol=1e-5)


def test_a_very_negative_gate_is_not_clamped():
    gate = np.array([-50.0, -8.0, 8.0], np.float32)
    found = ClampedSwiGLU()(gate, np.zeros(3, np.float32))
    limited = np.minimum(gate.astype(np.float64), 7.0)
    np.testing.assert_allclose(found, limited / (1 + np.exp(-1.702 * limited)), rtol=1e-5, atol=1e-8)


class Product(Gating):
    """A bilinear gating without an activation."""

    def __call__(self, gate, up):
        return gate * up


def test_a_custom_gating_replaces_the_activation():
    cfg = FeedForward.Config(input_dim=4, hidden_dim=6, gating=Product())
    params = parameters(cfg)
    made = products(params)
    np.testing.assert_allclose(call(cfg, params, X)[0], down(params, made["gate"] * made["up"]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{}, {"gate": None}, {"gating": ClampedSwiGLU()}, {"activation": jax.nn.gelu}],
    ids=lambda each: ",".join(each) or "default",
)
def test_combined_gives_the_hidden_features_of_the_block(changes):
    cfg = FeedForward.Config(input_dim=4, hidden_dim=6, **changes)
    params = parameters(cfg)
    made = products(params)
    hidden = combined(cfg, *(None if name not in made else made[name].astype(np.float32) for name in ("gate", "up")))
    np.testing.assert_allclose(call(cfg, params, X)[0], down(params, hidden), rtol=1e-3, atol=1e-4)


def test_gating_without_a_gate_raises_with_its_path():
    told = r"gating=.*ClampedSwiGLU.* requires a gate, got gate=None"
    ffn = FeedForward.Config(hidden_dim=6, gate=None, gating=ClampedSwiGLU())
    layer = TransformerLayer.Config(input_dim=4, ffn=ffn)
    layer = ax.select(layer, "attention").set(num_heads=2)
    with pytest.raises(ax.ConfigError, match=rf"ffn: {told}"):
        abstract(layer)
