"""Parameters with a rate of 0 have no gradient and no optimizer state, and do not count in the gradient norm."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.parallel import Mesh
from axcore.train import AdamW, Checkpointer, CrossEntropy, Learner, Saving, WarmupStableDecay
from axcore.train.step.program import program

pytestmark = pytest.mark.long

LAYER = TransformerLayer.Config(
    attention=Attention.Config(num_heads=2, num_kv_heads=1), ffn=FeedForward.Config(hidden_dim=48)
)
MODEL = CausalLM.Config(vocab_size=11, dim=16, decoder=Repeat.Config(num_layers=2, layers=LAYER))
OBJECTIVE = CrossEntropy.Config(z_loss=0.1)
RATES = {"**": 0.0, "decoder.layers.attention.query.**": 1.0, "norm.**": 0.5}
TRAINED = {"decoder.layers.attention.query.weight", "norm.scale"}


def made(rates=None, **options):
    schedule = WarmupStableDecay(peak=0.1, warmup_steps=1, decay=0.0)
    learner = Learner.Config(schedule=schedule, rates=rates or {}, **options)
    return program(MODEL, learner, Mesh().make(jax.devices()[:1]), OBJECTIVE)


def batch():
    ids = np.random.default_rng(3).integers(0, 11, (4, 9)).astype(np.int32)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((4, 8), np.float32)}


def by_path(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def step(found):
    """(parameters before, after, metrics) of one step."""
    state = found.init(jnp.uint32(5))
    before = jax.device_get(state.params)
    state, metrics = found.compile_train(batch())(state, batch())
    return by_path(before), by_path(state.params), metrics


@pytest.fixture(scope="module")
def moved():
    return step(made(RATES, clip_norm=None))


@pytest.fixture(scope="module")
def gradients():
    """{path: gradient of the objective}, computed without the trainer and converted to float64."""
    fn, _, _ = abstract(MODEL)

    def objective(params):
        return OBJECTIVE.build().value(fn, params, {}, batch(), training=True)

    found = by_path(jax.jit(jax.grad(objective))(made().init(jnp.uint32(5)).params))
    return {path: np.asarray(leaf, np.float64) for path, leaf in found.items()}


def test_no_optimizer_state_is_held_for_frozen_parameters():
    state = made(RATES).state
    moments = [path for path, leaf in by_path(state.optimizer).items() if leaf.ndim]
    assert len(moments) == 2 * len(TRAINED)
    assert {path.partition("u.")[2] for path in moments} == TRAINED  # of `0.mu.norm.scale`, and of `nu`
    assert by_path(state.params).keys() == by_path(made().state.params).keys()


@pytest.mark.slow
def test_only_trained_parameters_change_and_count_in_the_norm(moved, gradients):
    before, after, metrics = moved
    assert {path for path in before if (before[path] != after[path]).any()} == TRAINED
    norm = np.sqrt(sum(np.square(gradients[path]).sum() for path in TRAINED))
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)
    whole = np.sqrt(sum(np.square(leaf).sum() for leaf in gradients.values()))
    assert whole > 1.5 * norm  # the norm over all parameters is clearly different


def test_clipping_uses_the_norm_of_the_trained_gradients():
    """With eps far above the gradient, the first update of Adam is g / eps, so it reveals the clipped gradient."""
    eps, clip = 1e6, 1e-3
    optimizer = AdamW.Config(eps=eps, weight_decay=0.0)
    rates = {"**": 0.0, "norm.**": 1.0}
    schedule = WarmupStableDecay(peak=1e6, warmup_steps=1, decay=0.0)
    learner = Learner.Config(optimizer=optimizer, schedule=schedule, rates=rates, clip_norm=clip)
    before, after, _ = step(program(MODEL, learner, Mesh().make(jax.devices()[:1]), OBJECTIVE))
    moved = before["norm.scale"] - np.asarray(after["norm.scale"], np.float64)
    np.testing.assert_allclose(np.linalg.norm(moved), clip, rtol=1e-3)


@pytest.mark.slow
def test_trained_parameters_are_updated_like_plain_adamw(moved, gradients):
    before, after, _ = moved
    for path, factor in {"decoder.layers.attention.query.weight": 1.0, "norm.scale": 0.5}.items():
        gradient, start = gradients[path], np.asarray(before[path], np.float64)
        decay = 0.1 * start if path.endswith("weight") else 0.0
        expected = start - 0.1 * factor * (gradient / (np.abs(gradient) + 1e-8) + decay)
        np.testing.assert_allclose(after[path], expected, rtol=1e-4, atol=1e-6, err_msg=path)


def test_the_step_does_not_compute_gradients_of_frozen_matrices():
    def flops(rates):
        found = made(rates)
        return jax.jit(found.train_step).lower(found.state, found.batch_shapes(batch())).cost_analysis()["flops"]

    # A matrix has three products: forward pass, input gradient and weight gradient. Freezing removes the last.
    assert flops({"decoder.**": 0.0}) < 0.8 * flops({})


def test_nonzero_rates_do_not_change_the_state_structure():
    assert jax.tree.structure(made({"norm.**": 0.5}).state) == jax.tree.structure(made().state)


def test_freezing_everything_raises():
    with pytest.raises(ax.ConfigError, match=r"learner\.rates: .* freezes every parameter"):
        made({"**": 0.0})


def test_a_run_with_frozen_parameters_resumes_to_the_same_bits(tiny, tmp_path):
    cfg = ax.override(tiny, ['learner.rates={"**": 0.0, "decoder.layers.ffn.**": 1.0}', "steps=8"])
    cfg = cfg.set(callbacks={"saving": Saving.Config(every_steps=4)})
    form = cfg.build().program().state

    def saved(*, resume):
        ax.fit(cfg, tmp_path, resume=resume)
        with Checkpointer.Config().build(tmp_path / "checkpoints") as checkpointer:
            state = by_path(checkpointer.restore(form, 8).state)
        shutil.rmtree(tmp_path / "checkpoints/8")
        return state

    straight, resumed = saved(resume=False), saved(resume=True)
    assert straight.keys() == resumed.keys()
    for path, leaf in straight.items():
        assert np.asarray(leaf).tobytes() == np.asarray(resumed[path]).tobytes(), path
    moments = {path.partition("u.")[2] for path, leaf in by_path(form.optimizer).items() if leaf.ndim}
    assert moments == {path for path in by_path(form.params) if path.startswith("decoder.layers.ffn.")}
