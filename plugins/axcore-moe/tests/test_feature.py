"""The feature `moe`: config edits, decoding, state in scanned stacks, a mesh with an expert axis and training."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.infer import Decoder, Step
from axcore.module import functional, invoke
from axcore.nn import ContiguousCache, FeedForward, Repeat, layers_of
from axcore.parallel import Mesh
from axcore.testing import tiny_batch, tiny_model
from axcore.testing.devices import steps
from axcore.testing.models import OBJECTIVE, objective
from axcore.train import Learner, Trainer, WarmupStableDecay
from axcore.train.data import ByteTokenizer, TextFiles, TextInput
from axcore_moe.dead_experts import DeadExpertWarning
from axcore_moe.dispatch import Capacity, Dropless
from axcore_moe.exchange import Exchange
from axcore_moe.layer import MoE

pytestmark = pytest.mark.long


def test_every_nth_block_becomes_a_mixture():
    cfg = ax.select(tiny_model(), "decoder").set(num_layers=5)
    plain = ax.select(cfg, "**.ffn").set(activation=jax.nn.gelu, gate=None)
    found = ax.pipe(plain, ax.use("moe", num_experts=4, every=2, hidden_dim=7))
    blocks = [place.config.ffn for place in layers_of(found.decoder)]
    assert [isinstance(block, MoE.Config) for block in blocks] == [False, True, False, True, False]
    assert blocks[1].experts.block == FeedForward.Config(hidden_dim=7, activation=jax.nn.gelu, gate=None)


def test_moe_in_every_layer_keeps_one_scan():
    found = ax.pipe(tiny_model(), ax.use("moe", num_experts=4))
    assert isinstance(found.decoder, Repeat.Config) and found.decoder.num_layers == 2


def test_default_weight_of_the_balance_loss():
    def balance(**options):
        cfg = ax.pipe(tiny_model(), ax.use("moe", num_experts=4, **options))
        (mixture,) = (node for _, node in ax.select(cfg, MoE))
        return mixture.balance and mixture.balance.weight

    assert balance() == 0.01
    assert balance(bias_rate=0.001) is None and balance(expert_choice=True) is None and balance(balance=0.0) is None
    assert balance(bias_rate=0.001, balance=1e-4) == 1e-4


@pytest.mark.parametrize("dispatch", ["dropless", "capacity", "dense"])
def test_decoding_matches_the_full_pass(dispatch):
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
    step, found = jax.jit(decoder.__call__), []
    for place in range(8):
        logits, state = step(params, state, Step(ids[:, place : place + 1], jnp.full((2,), place)))
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, axis=1), full, rtol=1e-4, atol=1e-5)


def test_expert_choice_trains_and_cannot_decode():
    cfg = ax.pipe(tiny_model(), ax.use("moe", num_experts=4, expert_choice=True))
    model = cfg.build(rngs=ax.Rngs(0))
    fn, params, state = functional(model)
    assert np.isfinite(jax.jit(lambda params: objective(fn, params, state, tiny_batch()))(params))
    with pytest.raises(ax.ConfigError, match="depending on later tokens, so it cannot decode"):
        Decoder.of(model, cache=ContiguousCache.Config(), batch_size=2, max_len=8)


def test_a_scanned_stack_writes_the_state_of_each_layer():
    cfg = ax.pipe(tiny_model(), ax.use("moe", num_experts=4, bias_rate=0.5))
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    train = jax.jit(lambda key: fn(params, state, tiny_batch(), key=key, training=True, method=OBJECTIVE.build())[1])
    bias = np.asarray(train(jax.random.key(0))["decoder"]["layers"]["ffn"]["router"]["bias"])
    assert bias.shape == (2, 4) and np.abs(bias).max() == 0.5 and not np.array_equal(bias[0], bias[1])


def test_the_default_dispatch_is_that_of_expert_parallelism_if_tokens_choose_experts():
    def dispatches(**options):
        cfg = ax.pipe(tiny_model(), ax.use("moe", num_experts=4, **options))
        return {node.dispatch for _, node in ax.select(cfg, MoE)}

    assert dispatches() == {Exchange()}
    assert dispatches(expert_choice=True) == {Dropless()}


@pytest.mark.slow  # starts a process that compiles for eight devices
@pytest.mark.parametrize("dispatch", ["dropless", "exchange", "capacity"])
def test_eight_devices_match_one(dispatch):
    cfg = ax.pipe(tiny_model(), ax.use("moe", num_experts=4, dispatch=dispatch))
    batch = jax.tree.map(np.asarray, tiny_batch(rows=8))
    rules = {"batch": ("data", "expert"), "expert": "expert"}
    one, eight = steps(
        cfg,
        batch,
        [Mesh(shape={"data": 1, "expert": 1}, rules=rules), Mesh(shape={"data": 2, "expert": 4}, rules=rules)],
    )
    assert any(path.endswith("experts.up.weight") for path in eight["sharded"])
    np.testing.assert_allclose(eight["loss"], one["loss"], rtol=1e-5)
    for path, update in one["updates"].items():
        atol = 1e-5 + 1e-4 * np.abs(update).max()
        np.testing.assert_allclose(eight["updates"][path], update, rtol=1e-3, atol=atol, err_msg=path)


@pytest.mark.slow
def test_run_learns_and_warns_about_dead_experts(tmp_path, capsys):
    (tmp_path / "corpus").mkdir()
    for number in range(40):
        (tmp_path / "corpus" / f"{number}.txt").write_text("banana orange kiwi " * (10 + number))
    source = TextFiles.Config(folder=str(tmp_path / "corpus"), validation_percent=25.0)
    cfg = Trainer.Config(
        model=tiny_model().set(vocab_size=ByteTokenizer.Config().build().vocab_size),
        input=TextInput.Config(source=source, seq_len=16, batch_size=4, prefetch_batches=0),
        learner=Learner.Config(schedule=WarmupStableDecay(peak=1e-2, warmup_steps=2)),
        steps=12,
    )
    cfg = ax.pipe(cfg, ax.use("moe", num_experts=4, bias_rate=0.001))
    assert cfg.callbacks["dead_experts"] == DeadExpertWarning.Config()
    # With this threshold, every expert has a low load in every step.
    cfg = ax.select(cfg, MoE).set(dead_expert_threshold=3.9, dead_expert_steps=3)
    ax.fit(cfg, out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < losses[0] - 0.5
    told = [line for line in capsys.readouterr().err.splitlines() if "are dead" in line]
    assert [line.partition(" of ")[2].partition(" are")[0] for line in told] == [
        "decoder.layers.0.ffn",
        "decoder.layers.1.ffn",
    ]
    assert told[0].startswith("step 3: ")


def test_replacing_a_mixture_again_is_rejected():
    cfg = ax.pipe(tiny_model(), ax.use("moe", num_experts=4))
    with pytest.raises(ax.ConfigError, match=r"decoder\.layers\.ffn is already a mixture of experts"):
        ax.pipe(cfg, ax.use("moe", num_experts=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 2, "top_k": 3}, "top_k=3 is more than num_experts=2"),
        ({"num_experts": 4, "every": 3}, "every=3 exceeds the number of selected"),
        ({"num_experts": 4, "every": 0}, "every must be at least 1, not 0"),
        (
            {"num_experts": 4, "dispatch": "magic"},
            "dispatch='magic' is not a dispatch. Give a Dispatch, or one of dropless, exch",
        ),
        (
            {"num_experts": 4, "capacity_factor": 1.0},
            "capacity_factor=1.0 requires dispatch='capacity', not 'exchange'",
        ),
        (
            {"num_experts": 4, "dispatch": "capacity", "capacity_factor": 0.0},
            "factor must be above 0, not 0.0",
        ),
        ({"num_experts": 4, "expert_choice": True, "bias_rate": 0.1}, "have no effect with expert_choice"),
        ({"num_experts": 4, "expert_choice": True, "balance": 0.1}, "has no effect with expert_choice"),
        ({"num_experts": 4, "groups": 3}, "ffn.router: num_experts=4 does not divide into groups=3"),
        ({"num_experts": 4, "groups": 2, "top_groups": 3}, "top_groups=3 exceeds groups=2"),
        ({"num_experts": 4, "groups": 4, "top_groups": 1}, "top_k=2 exceeds the 1 available experts of top_groups=1"),
        ({"num_experts": 4, "jitter": 1.5}, "jitter must be at least 0 and below 1, not 1.5"),
        ({"num_experts": 4, "where": "decoder.layers.attention"}, "only a FeedForward can become a mixture of experts"),
    ],
)
def test_invalid_options_are_rejected_with_the_requirement(options, message):
    with pytest.raises(ax.ConfigError, match=message.replace(".", r"\.")):
        ax.pipe(tiny_model(), ax.use("moe", **options)).build(rngs=ax.Rngs(0))
