"""Routing, dispatch, losses and balance, against straight NumPy in float64; the feature; bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import axcore as ax
from axcore.config import walk
from axcore.infer import Decoder
from axcore.module import functional, invoke
from axcore.nn import ContiguousCache, FeedForward, Linear, Repeat, layers_of
from axcore.testing import tiny_batch, tiny_model
from axcore.testing.models import objective
from axcore_moe.balance import LoadBalance
from axcore_moe.dispatch import Capacity, Dense, Dropless
from axcore_moe.experts import Experts
from axcore_moe.layer import MoE
from axcore_moe.matmul import Tokamax
from axcore_moe.router import ExpertChoice, TopK
from axcore_moe.starvation import StarvationWarning

DIM, HIDDEN = 4, 3


def mixture(num_experts=4, **fields):
    cfg = MoE.Config(
        input_dim=DIM, num_experts=num_experts, experts=Experts.Config(block=FeedForward.Config(hidden_dim=HIDDEN))
    )
    return cfg.set(**fields)


def tokens(count, rows=1):
    return jnp.asarray(np.random.default_rng(0).normal(size=(rows, count, DIM)).astype(np.float32))


def expected(params, x, top_k):
    """The definition: for each token, the experts with the largest softmax, weighted by it."""
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    flat = np.asarray(x, np.float64).reshape(-1, DIM)
    out = np.zeros_like(flat)
    for i, token in enumerate(flat):
        logits = token @ wide["router"]["linear"]["weight"]
        chosen = np.argsort(-logits, kind="stable")[:top_k]
        weights = np.exp(logits[chosen] - logits[chosen].max())
        for expert, weight in zip(chosen, weights / weights.sum(), strict=True):
            gate, up = (token @ wide["experts"][name][expert] for name in ("gate", "up"))
            out[i] += weight * ((gate / (1 + np.exp(-gate)) * up) @ wide["experts"]["down"][expert])
    return out.reshape(x.shape)


@settings(deadline=None, max_examples=12, derandomize=True)
@given(count=st.integers(1, 9), experts=st.integers(1, 5), data=st.data())
def test_every_dispatch_computes_the_definition(count, experts, data):
    top_k = data.draw(st.integers(1, experts))
    x, outs = tokens(count), []
    for dispatch in (Dense(), Dropless(), Capacity(factor=float(experts))):
        cfg = mixture(experts, router=TopK.Config(top_k=top_k), dispatch=dispatch)
        fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
        outs.append(fn(params, state, x)[0][0])
    for out in outs:
        np.testing.assert_allclose(out, expected(params, x, top_k), rtol=1e-4, atol=1e-6)


def test_gradients_of_every_dispatch_agree():
    x, found = tokens(7), []
    for dispatch in (Dense(), Dropless(), Capacity(factor=4.0)):
        fn, params, state = functional(mixture(dispatch=dispatch).build(rngs=ax.Rngs(0)))
        found.append(jax.grad(lambda params, fn=fn, state=state: jnp.square(fn(params, state, x)[0][0]).sum())(params))
    for other in found[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found[0], other)


def test_all_tokens_may_go_to_one_expert():
    fn, params, state = functional(mixture(router=TopK.Config(top_k=1)).build(rngs=ax.Rngs(0)))
    params["router"]["linear"]["weight"] = jnp.zeros((DIM, 4))  # ties go to the first expert
    x = tokens(6)
    np.testing.assert_allclose(fn(params, state, x)[0][0], expected(params, x, 1), rtol=1e-4, atol=1e-6)


def test_what_finds_no_place_is_dropped_last_choices_first_and_told():
    cfg = mixture(router=TopK.Config(top_k=1), dispatch=Capacity(factor=1.0))
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    params["router"]["linear"]["weight"] = jnp.zeros((DIM, 4))
    x = tokens(8)
    (out, collections), _ = fn(params, state, x, key=jax.random.key(0), training=True)
    np.testing.assert_allclose(out[:, :2], expected(params, x, 1)[:, :2], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(out[:, 2:], 0)  # 8 choices of one expert, which has 2 places
    assert collections.scalars()["dropped"] == pytest.approx(0.75)


def test_experts_choose_as_many_tokens_each():
    router = ExpertChoice.Config(input_dim=DIM, num_experts=4, capacity_factor=2.0).build(rngs=ax.Rngs(0))
    x = tokens(6)[0]
    routing = router(x)
    np.testing.assert_array_equal(routing.counts(), [3, 3, 3, 3])
    probs = np.asarray(routing.probs)
    for expert in range(4):
        own = np.asarray(routing.token)[np.asarray(routing.expert) == expert]
        assert set(own) == set(np.argsort(-probs[:, expert])[:3])


def test_a_model_whose_experts_choose_trains_and_is_not_decoded():
    cfg = ax.pipe(tiny_model(), ax.use("moe", num_experts=4, expert_choice=True))
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    assert np.isfinite(objective(fn, params, state, tiny_batch()))
    with pytest.raises(ax.ConfigError, match="routes a token by those after it, so it cannot decode"):
        Decoder.of(cfg.build(rngs=ax.Rngs(0)), cache=ContiguousCache.Config(), batch_size=2, max_len=8)


@pytest.mark.parametrize("scope", ["sequence", "global"])
@pytest.mark.parametrize("per_choice", [False, True])
def test_the_balance_loss_over_its_scope(scope, per_choice):
    router = TopK.Config(input_dim=DIM, num_experts=4, top_k=2).build(rngs=ax.Rngs(0))
    x = tokens(5, rows=3)
    routing = router(x.reshape(-1, DIM))
    probs = np.asarray(routing.probs, np.float64).reshape(3, 5, 4)
    top = np.argsort(-probs, axis=-1)[..., :2]
    chosen = (top[..., None] == np.arange(4)).sum(axis=2)
    axis = 1 if scope == "sequence" else (0, 1)
    loss = 4 * (chosen.mean(axis=axis) * probs.mean(axis=axis)).sum(axis=-1).mean() / (2 if per_choice else 1)
    found = LoadBalance(weight=1.0, scope=scope, per_choice=per_choice)(routing, rows=3)
    np.testing.assert_allclose(found, loss, rtol=1e-5)


def test_losses_join_the_objective_of_training_alone():
    cfg = ax.pipe(tiny_model(), ax.use("moe", num_experts=4, balance=0.5, z_loss=0.1))
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    (_, collections), _ = fn(params, state, tiny_batch(), key=jax.random.key(0), training=True, method="loss")
    assert {name.rpartition(".")[2] for name in collections.losses} == {"balance", "router_z_loss", "z_loss"}
    (_, collections), _ = fn(params, state, tiny_batch(), method="loss")
    assert {name.rpartition(".")[2] for name in collections.losses} == {"z_loss"}


def test_the_bias_moves_against_the_load_while_training_and_chooses_but_does_not_weigh():
    cfg = mixture(router=TopK.Config(top_k=1, score="sigmoid", normalize=False, bias_rate=0.25))
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    x = tokens(8)
    _, same = fn(params, state, x)
    np.testing.assert_array_equal(same["router"]["bias"], 0)
    _, moved = fn(params, state, x, key=jax.random.key(0), training=True)
    logits = np.asarray(x)[0] @ np.asarray(params["router"]["linear"]["weight"])
    load = np.bincount(logits.argmax(axis=-1), minlength=4)
    np.testing.assert_allclose(moved["router"]["bias"], 0.25 * np.sign(load.mean() - load))
    forced = {**state, "router": {"bias": jnp.asarray([0.0, 0.0, 9.0, 0.0])}}
    (out, _), _ = fn(params, forced, x)
    alone = jax.tree.map(lambda leaf: leaf[2:3], params["experts"])
    one = {"router": {"linear": {"weight": jnp.zeros((DIM, 1))}}, "experts": alone}
    by_third = expected(one, x, 1)
    np.testing.assert_allclose(out, by_third / (1 + np.exp(-logits[None, :, 2:3])), rtol=1e-4, atol=1e-6)


def test_the_bias_evens_out_a_load_that_no_loss_balances():
    cfg = mixture(router=TopK.Config(top_k=1, bias_rate=0.01, score="sigmoid"))
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    params["router"]["linear"]["weight"] = params["router"]["linear"]["weight"].at[:, 0].add(1.0)
    x = jnp.abs(tokens(64))
    step = jax.jit(lambda state: fn(params, state, x, key=jax.random.key(0), training=True))
    (_, first), state = step(state)
    for _ in range(150):
        (_, last), state = step(state)
    assert first.scalars()["max_load"] > 2.5 and last.scalars()["max_load"] < 1.5


def test_jitter_moves_the_router_while_training_alone():
    fn, params, state = functional(mixture(router=TopK.Config(jitter=0.5)).build(rngs=ax.Rngs(0)))
    x = tokens(9)
    plain = fn(params, state, x)[0][0]
    draws = [fn(params, state, x, key=jax.random.key(seed), training=True)[0][0] for seed in (0, 1)]
    assert not np.allclose(draws[0], plain) and not np.allclose(draws[0], draws[1])
    np.testing.assert_array_equal(fn(params, state, x, key=jax.random.key(0))[0][0], plain)


def test_the_shared_block_computes_every_token_and_may_be_gated():
    shared = FeedForward.Config(hidden_dim=HIDDEN)
    fn, params, state = functional(mixture(shared=shared, shared_gate=Linear.Config()).build(rngs=ax.Rngs(0)))
    block = functional(shared.set(input_dim=DIM).build(rngs=ax.Rngs(0)))[0]
    x = tokens(5)
    gate = jax.nn.sigmoid(x @ params["shared_gate"]["weight"])
    routed = expected({name: params[name] for name in ("router", "experts")}, x, 2)
    out = fn(params, state, x)[0][0]
    np.testing.assert_allclose(out, routed + gate * block(params["shared_block"], {}, x)[0][0], rtol=1e-4, atol=1e-5)


# The feature


def test_every_nth_block_becomes_a_mixture_of_such_blocks():
    cfg = ax.select(tiny_model(), "decoder").set(num_layers=5)
    biased = ax.select(cfg, "**.ffn").set(activation=jax.nn.gelu, gate=None)
    found = ax.pipe(biased, ax.use("moe", num_experts=4, every=2, hidden_dim=7))
    blocks = [place.config.ffn for place in layers_of(found.decoder)]
    assert [isinstance(block, MoE.Config) for block in blocks] == [False, True, False, True, False]
    assert blocks[1].experts.block == FeedForward.Config(hidden_dim=7, activation=jax.nn.gelu, gate=None)


def test_all_blocks_of_a_stack_stay_one_scan():
    found = ax.pipe(tiny_model(), ax.use("moe", num_experts=4))
    assert isinstance(found.decoder, Repeat.Config) and found.decoder.num_layers == 2


@pytest.mark.parametrize("dispatch", ["dropless", "capacity", "dense"])
def test_it_decodes_as_it_computes_in_full(dispatch):
    cfg = ax.pipe(
        tiny_model(),
        ax.use("rope"),
        ax.use("moe", num_experts=4, every=2, dispatch=dispatch, shared_experts=1, bias_rate=0.001),
    )
    if dispatch == "capacity":
        cfg = ax.select(cfg, MoE).set(dispatch=Capacity(factor=4.0))
    model, ids = cfg.build(rngs=ax.Rngs(0)), tiny_batch()["inputs"]
    full = invoke(model, ids)[0]
    decoder, params, state = Decoder.of(model, cache=ContiguousCache.Config(), batch_size=2, max_len=8)
    step, found = jax.jit(decoder), []
    for place in range(8):
        logits, state = step(params, state, ids[:, place : place + 1], jnp.full((1, 1), place))
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, axis=1), full, rtol=1e-4, atol=1e-5)


def test_a_scanned_stack_writes_the_state_of_each_layer():
    cfg = ax.pipe(tiny_model(), ax.use("moe", num_experts=4, bias_rate=0.5))
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    _, new = fn(params, state, tiny_batch(), key=jax.random.key(0), training=True, method="loss")
    bias = np.asarray(new["decoder"]["layers"]["ffn"]["router"]["bias"])
    assert bias.shape == (2, 4) and np.abs(bias).max() == 0.5 and not np.array_equal(bias[0], bias[1])


def test_an_expert_that_starves_is_counted_and_the_run_warns_once(capsys, tmp_path):
    cfg = mixture(router=TopK.Config(top_k=1), starving_steps=2)
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    params["router"]["linear"]["weight"] = jnp.zeros((DIM, 4))
    found = []
    for _ in range(3):
        (_, collections), state = fn(params, state, tokens(8), key=jax.random.key(0), training=True)
        found.append(float(collections.scalars()["starved"]))
    assert found == [0, 3, 3]
    writer = StarvationWarning.Config().build(tmp_path)
    for step, count in enumerate(found):
        writer.write(step, {"decoder.layers.ffn.starved": count, "loss": 1.0})
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.startswith("step 1: 3 experts of decoder.layers.ffn have starved")


def test_a_recipe_gets_the_warning_and_no_block_becomes_a_mixture_twice():
    cfg = ax.pipe(ax.recipe("quickstart"), ax.use("moe", num_experts=4))
    assert [each for each in cfg.writers if isinstance(each, StarvationWarning.Config)] == [StarvationWarning.Config()]
    with pytest.raises(ax.ConfigError, match=r"block must be .*FeedForward.*, not .*MoE"):
        ax.pipe(cfg, ax.use("moe", num_experts=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 2, "top_k": 3}, "top_k=3 is more than num_experts=2"),
        ({"num_experts": 4, "every": 3}, "every=3 is more than the feed-forward blocks that were selected"),
        ({"num_experts": 4, "every": 0}, "every must be at least 1, not 0"),
        ({"num_experts": 4, "capacity_factor": 1.0}, "capacity_factor=1.0 needs dispatch='capacity', not 'dropless'"),
        (
            {"num_experts": 4, "dispatch": "capacity", "capacity_factor": 0.0},
            "Capacity.factor must be positive, not 0.0",
        ),
        ({"num_experts": 4, "expert_choice": True, "bias_rate": 0.1}, "expert_choice has no use for"),
        ({"num_experts": 4, "groups": 3}, "ffn.router: num_experts=4 does not divide into groups=3"),
        ({"num_experts": 4, "groups": 2, "top_groups": 3}, "top_groups=3 is more than the groups=2"),
        ({"num_experts": 4, "groups": 4, "top_groups": 1}, "top_k=2 is more than the 1 experts of top_groups=1"),
        ({"num_experts": 4, "jitter": 1.5}, "jitter must be at least 0 and below 1, not 1.5"),
        ({"num_experts": 4, "where": "decoder.layers.attention"}, "only a FeedForward becomes a mixture of experts"),
    ],
)
def test_bad_options_are_refused_with_what_was_expected(options, message):
    with pytest.raises(ax.ConfigError, match=message.replace(".", r"\.")):
        ax.pipe(tiny_model(), ax.use("moe", **options)).build(rngs=ax.Rngs(0))


def test_adapters_on_experts_are_refused_and_not_ignored():
    cfg = ax.pipe(tiny_model(), ax.use("moe", num_experts=4))
    adapters = ax.select(cfg, "**.block.up").set(adapter=Linear.Config())
    assert any(path.endswith("block.up.adapter") for path, _ in walk(adapters))
    with pytest.raises(
        ax.ConfigError, match=r"experts: block\.up\.adapter=.* the stacked weights of experts take none"
    ):
        adapters.build(rngs=ax.Rngs(0))


def test_a_grouped_product_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokamax", None)
    fn, params, state = functional(mixture(dispatch=Dropless(matmul=Tokamax())).build(rngs=ax.Rngs(0)))
    with pytest.raises(ax.ConfigError, match=r"Tokamax needs tokamax \(pip install tokamax\)"):
        fn(params, state, tokens(3))
