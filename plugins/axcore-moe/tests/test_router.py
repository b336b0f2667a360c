"""Routing against NumPy, jitter, the selection bias and the shared block."""

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.nn import FeedForward, Linear
from axcore_moe.router import ExpertChoice, TopK

from .support import DIM, HIDDEN, call, expected, mixture, parameters, shapes, tokens


@pytest.mark.parametrize(("count", "each"), [(6, 3), (1, 1)])
def test_experts_choose_equal_numbers_of_tokens(count, each):
    cfg = ExpertChoice.Config(input_dim=DIM, num_experts=4, capacity_factor=2.0)
    fn, params = shapes(cfg)[0], parameters(cfg)
    routing = jax.jit(lambda x: fn(params, {}, x)[0][0])(tokens(count)[0])
    np.testing.assert_array_equal(routing.counts(), [each] * 4)
    probs = np.asarray(routing.probs)
    for expert in range(4):
        own = np.asarray(routing.token)[np.asarray(routing.expert) == expert]
        assert set(own) == set(np.argsort(-probs[:, expert])[:each])


def test_bias_moves_against_the_load_only_in_training():
    cfg = mixture(router=TopK.Config(top_k=1, score="sigmoid", bias_rate=0.25))
    params, x = parameters(cfg), tokens(8)
    np.testing.assert_array_equal(call(cfg, params, x)[2]["router"]["bias"], 0)
    moved = call(cfg, params, x, training=True)[2]["router"]["bias"]
    load = np.bincount((x[0] @ params["router"]["linear"]["weight"]).argmax(axis=-1), minlength=4)
    np.testing.assert_allclose(moved, 0.25 * np.sign(load.mean() - load))


def test_bias_affects_the_choice_but_not_the_weights():
    cfg = mixture(router=TopK.Config(top_k=1, score="sigmoid", normalize=False, bias_rate=0.25))
    params, x = parameters(cfg), tokens(8)
    third = {"router": {"bias": np.asarray([0.0, 0.0, 9.0, 0.0], np.float32)}, "low_load_steps": np.zeros(4, np.int32)}
    out = call(cfg, params, x, third)[0]
    alone = jax.tree.map(lambda leaf: leaf[2:3], params["experts"])
    by_third = expected({"router": {"linear": {"weight": np.zeros((DIM, 1))}}, "experts": alone}, x, 1)
    logits = x[0] @ params["router"]["linear"]["weight"]
    np.testing.assert_allclose(out, by_third / (1 + np.exp(-logits[None, :, 2:3])), rtol=1e-4, atol=1e-6)


def test_bias_balances_the_load_without_a_loss():
    cfg = mixture(router=TopK.Config(top_k=1, bias_rate=0.01, score="sigmoid"))
    params, x = parameters(cfg, scale=0.5), np.abs(tokens(64))
    params["router"]["linear"]["weight"][:, 0] += 1.0
    _, first, state = call(cfg, params, x, training=True)
    for _ in range(150):
        _, last, state = call(cfg, params, x, state, training=True)
    assert first.scalars()["max_load"] > 2.5 and last.scalars()["max_load"] < 1.5


def test_jitter_applies_only_in_training():
    cfg = mixture(router=TopK.Config(jitter=0.5))
    params, x = parameters(cfg), tokens(9)
    plain = call(cfg, params, x)[0]
    draws = [call(cfg, params, x, training=True, seed=seed)[0] for seed in (0, 1)]
    assert not np.allclose(draws[0], plain) and not np.allclose(draws[0], draws[1])
    np.testing.assert_array_equal(call(cfg, params, x, seed=1)[0], plain)


def test_router_computes_in_float32():
    cfg = mixture().set(dtypes=ax.DTypes(compute="bfloat16"))
    params, x = parameters(cfg), tokens(64)
    chosen = np.sort(np.argsort(-(x[0] @ params["router"]["linear"]["weight"]), axis=-1)[:, :2])
    state = {"low_load_steps": np.zeros(4, np.int32)}
    routing = jax.jit(lambda x: shapes(cfg)[0].bind(params, state).router(x))(x[0])
    assert routing.logits.dtype == np.float32
    np.testing.assert_array_equal(np.sort(np.asarray(routing.expert).reshape(2, -1).T), chosen)


@pytest.mark.parametrize("gated", [False, True])
def test_shared_block_processes_every_token(gated):
    shared = FeedForward.Config(hidden_dim=HIDDEN)
    cfg = mixture(shared=shared, shared_gate=Linear.Config() if gated else None)
    params, x = parameters(cfg), tokens(5)
    block = parameters(cfg)["shared_block"]
    gate, up = (x @ block[name]["weight"] for name in ("gate", "up"))
    own = (gate / (1 + np.exp(-gate)) * up) @ block["down"]["weight"]
    weight = 1 / (1 + np.exp(-x @ params["shared_gate"]["weight"])) if gated else 1.0
    out = call(cfg, params, x)[0]
    np.testing.assert_allclose(out, expected(params, x, 2) + weight * own, rtol=1e-4, atol=1e-5)


def test_a_shared_gate_requires_a_shared_block():
    with pytest.raises(ax.ConfigError, match="shared_gate requires a shared block, but shared is None"):
        shapes(mixture(shared_gate=Linear.Config()))
