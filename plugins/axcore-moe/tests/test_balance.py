"""Balance losses, summaries and the warning about dead experts."""

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.parallel import Mesh
from axcore.testing import tiny_batch, tiny_model
from axcore.testing.models import OBJECTIVE
from axcore.train import Learner, StepInfo
from axcore.train.step.program import program
from axcore_moe.balance import LoadBalance, z_loss
from axcore_moe.dead_experts import DeadExpertWarning
from axcore_moe.router import TopK
from axcore_moe.routing import Routing

from .support import call, mixture, parameters, to_first, tokens

pytestmark = pytest.mark.long


def routing_of(logits, top_k=2):
    probs = jax.nn.softmax(logits, axis=-1)
    weights, chosen = jax.lax.top_k(probs, top_k)
    return Routing.of_choices(chosen, weights, probs, logits)


LOGITS = np.random.default_rng(0).normal(size=(15, 4)).astype(np.float32)


@pytest.mark.parametrize("scope", ["sequence", "batch", "global"])
@pytest.mark.parametrize("per_choice", [False, True])
def test_balance_loss_matches_its_formula_for_every_scope(scope, per_choice):
    probs = np.exp(LOGITS.astype(np.float64))
    probs = (probs / probs.sum(axis=-1, keepdims=True)).reshape(3, 5, 4)
    chosen = (np.argsort(-probs, axis=-1)[..., :2, None] == np.arange(4)).sum(axis=2)
    axis = 1 if scope == "sequence" else (0, 1)  # without a mesh the batch is one shard
    loss = 4 * (chosen.mean(axis=axis) * probs.mean(axis=axis)).sum(axis=-1).mean() / (2 if per_choice else 1)
    found = LoadBalance(weight=1.0, scope=scope, per_choice=per_choice)(routing_of(LOGITS), rows=3)
    np.testing.assert_allclose(found.mean(), loss, rtol=1e-5)
    assert found.count == (3 if scope == "sequence" else 1)


def test_z_loss_is_the_mean_squared_log_partition():
    expected = np.square(np.log(np.exp(LOGITS.astype(np.float64)).sum(axis=-1))).mean()
    np.testing.assert_allclose(z_loss(routing_of(LOGITS), 0.5).mean(), 0.5 * expected, rtol=1e-5)


def test_losses_are_added_only_in_training():
    fn, params, state = abstract(ax.pipe(tiny_model(), ax.use("moe", num_experts=4, balance=0.5, z_loss=0.1)))

    def names(training):
        def run(params, state, batch, key):
            return fn(params, state, batch, key=key, training=training, method=OBJECTIVE.build())[0][1].losses

        found = jax.eval_shape(run, params, state, tiny_batch(), jax.random.key(0))
        return {name.rpartition(".")[2] for name in found}

    assert names(True) == {"balance", "router_z_loss", "z_loss"}
    assert names(False) == {"z_loss"}


def test_case_padding_changes_neither_losses_nor_counts():
    """Losses, summaries and selection biases stay equal when the tokens at padding change."""
    feature = ax.use("moe", num_experts=4, balance=0.5, z_loss=0.1, bias_rate=0.25)
    fn, forms, state = abstract(ax.pipe(tiny_model(), feature))
    params = jax.tree.map(lambda form: np.random.default_rng(0).normal(size=form.shape).astype(np.float32), forms)
    state = jax.tree.map(lambda form: np.zeros(form.shape, form.dtype), state)
    batch = {name: np.array(array) for name, array in tiny_batch().items()}
    kept = np.arange(batch["inputs"].shape[1]) < 5
    batch |= {
        "segment_ids": np.broadcast_to(kept.astype(np.int32), batch["inputs"].shape),
        "weights": batch["weights"] * kept,
    }

    @jax.jit
    def run(inputs):
        key = jax.random.key(0)
        (_, found), new = fn(
            params, state, {**batch, "inputs": inputs}, key=key, training=True, method=OBJECTIVE.build()
        )
        return {name: loss.mean() for name, loss in found.losses.items()}, found.scalars(), new

    first, second = run(batch["inputs"]), run(np.where(kept, batch["inputs"], 1))
    assert any("balance" in name for name in first[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), first, second)


def test_dead_experts_are_counted_and_reported_once(capsys):
    cfg = mixture(router=TopK.Config(top_k=1), dead_expert_steps=2)
    params, state, found = to_first(parameters(cfg)), None, []
    for _ in range(3):
        _, collections, state = call(cfg, params, tokens(8), state, training=True)
        found.append(float(collections.scalars()["dead_experts"]))
    assert found == [0, 3, 3]
    warning = DeadExpertWarning.Config().build()
    for step, count in enumerate(found):
        warning.step(StepInfo(step, {"decoder.layers.1.ffn.dead_experts": count, "loss": 1.0}, None))
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.startswith("step 1: 3 experts of decoder.layers.1.ffn are dead")


@pytest.mark.slow
def test_microbatches_give_the_losses_of_the_whole_batch():
    """With scope "sequence", the balance loss is a sum over rows. The z-loss is a sum over tokens."""
    model = ax.pipe(tiny_model(), ax.use("moe", num_experts=4, balance=0.5, balance_scope="sequence", z_loss=0.1))
    metrics = []
    for microbatches in (1, 2):
        made = program(model, Learner.Config(), Mesh().make(jax.devices()[:1]), OBJECTIVE, microbatches)
        metrics.append(made.compile_train(tiny_batch(4))(made.init(np.uint32(0)), tiny_batch(4))[1])
    whole, parts = metrics
    for name in ("balance", "router_z_loss"):
        path = f"decoder.layers.*.ffn.{name}"
        assert np.all(whole[path] > 0)
        np.testing.assert_allclose(parts[path], whole[path], rtol=1e-5)
    for name in ("loss", "z_loss", "gradient_norm"):
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-5)
