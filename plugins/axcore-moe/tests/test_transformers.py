"""Mixtures of experts against recorded values of `transformers` (see record_transformers.py)."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import functional
from axcore.nn import ClampedSwiGLU, FeedForward, Linear
from axcore_moe.balance import LoadBalance
from axcore_moe.dispatch import Capacity, Dense, Dropless
from axcore_moe.experts import Experts
from axcore_moe.layer import MoE
from axcore_moe.router import TopK
from axcore_moe.routing import Routing

pytestmark = pytest.mark.long

RECORDED = np.load(pathlib.Path(__file__).parent / "transformers.npz")
DIM, HIDDEN, EXPERTS = 8, 6, 8


def weights(name):
    return {key.partition("/")[2]: jnp.asarray(RECORDED[key]) for key in RECORDED if key.startswith(f"{name}/")}


def of_fused(given):
    """Parameters of an expert layer from `transformers`' [expert, 2 hidden, input] and [expert, input, hidden]."""
    gate, up = jnp.split(given["experts.gate_up_proj"].swapaxes(1, 2), 2, axis=-1)
    found = {"gate": gate, "up": up, "down": given["experts.down_proj"].swapaxes(1, 2)}
    return {name: {"weight": weight} for name, weight in found.items()}


def of_interleaved(given):
    """Like `of_fused` for gpt-oss, which interleaves gate and up and stores matrices as [input, output]."""
    fused, bias = given["experts.gate_up_proj"], given["experts.gate_up_proj_bias"]
    return {
        "gate": {"weight": fused[..., ::2], "bias": bias[..., ::2]},
        "up": {"weight": fused[..., 1::2], "bias": bias[..., 1::2]},
        "down": {"weight": given["experts.down_proj"], "bias": given["experts.down_proj_bias"]},
    }


BLOCK = FeedForward.Config(hidden_dim=HIDDEN)
BIASED = Linear.Config(use_bias=True)
OSS = FeedForward.Config(hidden_dim=HIDDEN, gate=BIASED, up=BIASED, down=BIASED, gating=ClampedSwiGLU())
CASES = {
    "mixtral": ({"router": TopK.Config(top_k=3)}, of_fused),
    "qwen3": ({"router": TopK.Config(top_k=3)}, of_fused),
    "qwen3_raw": ({"router": TopK.Config(top_k=3, normalize=False)}, of_fused),
    "deepseek": (
        {
            "router": TopK.Config(top_k=3, score="sigmoid", groups=4, top_groups=2, scale=2.5, bias_rate=0.001),
            "shared": FeedForward.Config(hidden_dim=2 * HIDDEN),
        },
        of_fused,
    ),
    "gpt_oss": (
        {
            "router": ax.select(TopK.Config(top_k=3), "linear").set(use_bias=True),
            "experts": Experts.Config(block=OSS),
        },
        of_interleaved,
    ),
}


@pytest.mark.parametrize(
    "dispatch",
    [pytest.param(Dense(), marks=pytest.mark.slow), Dropless(), Capacity(factor=8.0)],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name, dispatch):
    fields, experts = CASES[name]
    cfg = MoE.Config(input_dim=DIM, num_experts=EXPERTS, dispatch=dispatch, experts=Experts.Config(block=BLOCK))
    fn, params, state = functional(cfg.set(**fields).build(rngs=ax.Rngs(0)))
    given = weights(name)
    router = "router" if name == "gpt_oss" else "gate"
    linear = {"weight": given[f"{router}.weight"].T}
    if f"{router}.bias" in given:
        linear["bias"] = given[f"{router}.bias"]
    new = {"router": {"linear": linear}, "experts": experts(given)}
    if name == "deepseek":
        state["router"]["bias"] = given["gate.e_score_correction_bias"]
        shared = {part: given[f"shared_experts.{part}_proj.weight"].T for part in ("gate", "up", "down")}
        new["shared_block"] = {part: {"weight": value} for part, value in shared.items()}
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, params)
    x = jnp.asarray(RECORDED["x"])
    out = fn(new, state, x)[0][0]
    np.testing.assert_allclose(out, RECORDED[f"{name}.out"], rtol=1e-4, atol=1e-5)
    gradient = jax.grad(lambda x: jnp.square(fn(new, state, x)[0][0]).sum())(x)
    np.testing.assert_allclose(gradient, RECORDED[f"{name}.dx"], rtol=1e-3, atol=1e-4)


def routing(logits):
    probs = jax.nn.softmax(logits, axis=-1)
    weight, chosen = jax.lax.top_k(probs, 3)
    return Routing.of_choices(chosen, weight, probs, logits)


def test_load_balance_loss_matches_transformers():
    loss = LoadBalance(weight=1.0)(routing(jnp.asarray(RECORDED["loss.logits"][0])), rows=2).mean()
    np.testing.assert_allclose(loss, RECORDED["loss.one_layer"], rtol=1e-5)


def test_load_balance_loss_of_pooled_layers_matches_transformers():
    both = jnp.asarray(RECORDED["loss.logits"]).reshape(-1, EXPERTS)  # as if the tokens were those of one layer
    loss = LoadBalance(weight=1.0)(routing(both), rows=4).mean()
    np.testing.assert_allclose(loss, RECORDED["loss.two_layers"], rtol=1e-5)


def test_case_each_layer_adds_its_own_balance_loss():
    """`transformers` pools the layers instead: two layers have about the loss of one."""
    layers = [LoadBalance(weight=1.0)(routing(jnp.asarray(each)), rows=2).mean() for each in RECORDED["loss.logits"]]
    np.testing.assert_allclose(layers, [RECORDED["loss.one_layer"], 3.5067], rtol=1e-4)
    assert sum(layers) / 2 == pytest.approx(float(RECORDED["loss.two_layers"]), rel=0.1)


def test_case_balance_loss_leaves_out_padding_as_transformers_does():
    """The expected value is that of `load_balancing_loss_func` (5.24) with an attention mask."""
    counted = jnp.arange(10) < 2
    padded = dataclasses.replace(routing(jnp.asarray(RECORDED["loss.logits"][0])), counted=counted)
    np.testing.assert_allclose(LoadBalance(weight=1.0)(padded, rows=2).mean(), 3.4560709, rtol=1e-5)
    by_row = LoadBalance(weight=1.0, scope="sequence")(padded, rows=2)  # the second row is padding
    np.testing.assert_allclose([by_row.mean(), by_row.count], [3.4560709, 1.0], rtol=1e-5)
