"""The learner against AdamW written out in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import axcore as ax
from axcore.testing.optimizer import Constant
from axcore.train import AdamW, Learner, WarmupStableDecay
from axcore.train.step.learner import matrices

AXES = {
    "decoder": {"norm": ("layer", "embed"), "weight": ("layer", "embed", "mlp")},
    "embedding": ("vocab", "embed"),
    "bias": ("embed",),
    "scalar": (),
}
SHAPES = {
    "decoder": {"norm": (3, 4), "weight": (3, 4, 5)},
    "embedding": (7, 4),
    "bias": (4,),
    "scalar": (),
}
DECAYS = {"decoder": {"norm": False, "weight": True}, "embedding": True, "bias": False, "scalar": False}
IS_SHAPE = lambda node: isinstance(node, tuple)  # noqa: E731


def random_tree(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, SHAPES, is_leaf=IS_SHAPE)


def to_float64(tree):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


class Reference:
    """Algorithm 2 of arXiv 1711.05101, with decay scaled by the rate and gradients first clipped to a global norm."""

    def __init__(self, params, *, b1, b2, eps, decay, clip, rate):
        self.params = to_float64(params)
        self.decays = jax.tree.leaves(DECAYS)
        self.m = [np.zeros_like(p) for p in self.params]
        self.v = [np.zeros_like(p) for p in self.params]
        self.b1, self.b2, self.eps, self.decay, self.clip, self.rate = b1, b2, eps, decay, clip, rate
        self.steps = 0

    def update(self, grads):
        grads = to_float64(grads)
        norm = np.sqrt(sum((g**2).sum() for g in grads))
        if self.clip is not None and norm > self.clip:
            grads = [g * self.clip / norm for g in grads]
        rate = self.rate(self.steps)
        self.steps += 1
        for i, g in enumerate(grads):
            self.m[i] = self.b1 * self.m[i] + (1 - self.b1) * g
            self.v[i] = self.b2 * self.v[i] + (1 - self.b2) * g**2
            m = self.m[i] / (1 - self.b1**self.steps)
            v = self.v[i] / (1 - self.b2**self.steps)
            step = m / (np.sqrt(v) + self.eps)
            if self.decays[i]:
                step = step + self.decay * self.params[i]
            self.params[i] = self.params[i] - rate * step
        return norm, rate


@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
def test_several_steps_equal_adamw_written_out(clip):
    total = 20
    config = Learner.Config(
        optimizer=AdamW.Config(b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.3),
        schedule=WarmupStableDecay(peak=0.05, warmup_steps=3, decay=0.5),
        clip_norm=clip,
    )
    learner = config.build(AXES)
    params = random_tree(0)
    rate = lambda step: 0.05 * min(1.0, (step + 1) / 3, (total - step) / 10)  # noqa: E731
    reference = Reference(params, b1=0.8, b2=0.9, eps=1e-6, decay=0.3, clip=clip, rate=rate)
    state = learner.init(params)
    update = jax.jit(learner.update)
    for step in range(total):
        grads = random_tree(step + 1, scale=0.01 if step % 3 == 0 else 3.0)  # below the clip, and above it
        params, state, metrics = update(grads, state, params, jnp.int32(step), jnp.int32(total))
        norm, rate_of_step = reference.update(grads)
        assert set(metrics) == {"gradient_norm", "learning_rate"}
        assert float(metrics["gradient_norm"]) == pytest.approx(norm, rel=1e-5)  # before clipping
        assert float(metrics["learning_rate"]) == pytest.approx(rate_of_step, rel=1e-5)
        for found, expected in zip(to_float64(params), reference.params, strict=True):
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-6)


def test_weight_decay_shrinks_only_matrices():
    learner = Learner.Config(
        optimizer=AdamW.Config(weight_decay=0.5), schedule=WarmupStableDecay(peak=0.1, warmup_steps=1, decay=0.0)
    ).build(AXES)
    params = random_tree(0)
    zero = jax.tree.map(jnp.zeros_like, params)
    new, _, _ = jax.jit(learner.update)(zero, learner.init(params), params, jnp.int32(0), jnp.int32(10))
    shrunk = jax.tree.map(lambda a, b: bool((a != b).any()), new, params)
    assert shrunk == DECAYS
    np.testing.assert_allclose(new["embedding"], params["embedding"] * (1 - 0.1 * 0.5), rtol=1e-6)


def test_decayed_parameters_can_be_chosen_by_path():
    config = AdamW.Config(weight_decay=0.5, decays=lambda path, axes: path == "decoder.norm")
    learner = Learner.Config(optimizer=config, schedule=WarmupStableDecay(warmup_steps=1)).build(AXES)
    params = random_tree(0)
    zero = jax.tree.map(jnp.zeros_like, params)
    new, _, _ = jax.jit(learner.update)(zero, learner.init(params), params, jnp.int32(0), jnp.int32(10))
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), new, params)
    assert [path for path, value in jax.tree.leaves_with_path(changed) if value] == [
        (jax.tree_util.DictKey("decoder"), jax.tree_util.DictKey("norm"))
    ]


def test_the_stacking_axis_does_not_make_a_vector_a_matrix():
    assert not matrices("x", ("layer", "embed")) and not matrices("x", ("embed",)) and not matrices("x", ())
    assert matrices("x", ("embed", "mlp")) and matrices("x", ("layer", None, None))


def test_in_a_model_all_parameters_except_norms_decay(tiny):
    program = tiny.build().program()
    learner, params = program.learner, program.state.params
    ones = jax.tree.map(lambda shape: jnp.ones(shape.shape, shape.dtype), params)
    zero = jax.tree.map(jnp.zeros_like, ones)
    new, _, _ = jax.jit(learner.update)(zero, learner.init(ones), ones, jnp.int32(5), jnp.int32(100))
    decayed = {
        jax.tree_util.keystr(path, simple=True, separator="."): bool((leaf < 1).all())
        for path, leaf in jax.tree.leaves_with_path(new)
    }
    norms = {path for path, value in decayed.items() if not value}
    layers = "decoder.layers."
    assert norms == {layers + "attention_norm.scale", layers + "ffn_norm.scale", "norm.scale"}
    assert {"embedding.weight", layers + "attention.query.weight", layers + "ffn.down.weight"} <= decayed.keys()


def test_parameters_keep_their_dtype():
    learner = Learner.Config(clip_norm=1.0).build(AXES)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_tree(0))
    grads = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_tree(1))
    new, _, metrics = jax.jit(learner.update)(grads, learner.init(params), params, jnp.int32(50), jnp.int32(100))
    assert {leaf.dtype for leaf in jax.tree.leaves(new)} == {jnp.dtype("bfloat16")}
    assert metrics["gradient_norm"].dtype == metrics["learning_rate"].dtype == jnp.float32


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
def test_case_moments_and_updates_of_bfloat16_parameters_follow_float64(moment_dtype):
    cfg = AdamW.Config(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, moment_dtype=moment_dtype)
    learned = cfg.build().transformation({"weight": ("embed", "mlp")})
    params = {"weight": jnp.ones((4, 5), jnp.bfloat16)}
    state, update, random = learned.init(params), jax.jit(learned.update), np.random.default_rng(0)
    m = v = np.zeros((4, 5))
    for _ in range(60):
        grads = {"weight": jnp.asarray(1.0 + 0.1 * random.normal(size=(4, 5)), jnp.bfloat16)}
        g = np.asarray(grads["weight"], np.float64)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        updates, state = update(grads, state, params)
    adam = state[0]
    assert adam.nu["weight"].dtype == updates["weight"].dtype == jnp.float32
    assert adam.mu["weight"].dtype == jnp.dtype(moment_dtype)
    rough = 1e-5 if moment_dtype == "float32" else 4e-2
    expected = m / (1 - 0.9**60) / (np.sqrt(v / (1 - 0.999**60)) + 1e-8)
    np.testing.assert_allclose(adam.nu["weight"], v, rtol=1e-5)  # a bfloat16 accumulator would stall at a fifth of this
    np.testing.assert_allclose(np.asarray(adam.mu["weight"], np.float64), m, rtol=rough)
    np.testing.assert_allclose(updates["weight"], expected, rtol=rough)


def test_an_invalid_moment_dtype_is_rejected_at_construction():
    with pytest.raises(ax.ConfigError, match=r"AdamW\.moment_dtype: 'float17' is not a dtype"):
        AdamW.Config(moment_dtype="float17")


def test_rates_scale_and_freeze_by_path_and_the_last_pattern_counts():
    params, grads = random_tree(0), random_tree(1)
    step = jnp.int32(100), jnp.int32(1000)

    def moved(rates):
        learner = Learner.Config(clip_norm=None, rates=rates).build(AXES)
        new, _, _ = learner.update(grads, learner.init(params), params, *step)
        return jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), new, params)

    plain = moved({})
    mixed = moved({"**": 0.5, "decoder.**": 0.0, "decoder.weight": 2.0})
    np.testing.assert_array_equal(mixed["decoder"]["norm"], 0.0)
    np.testing.assert_allclose(mixed["decoder"]["weight"], 2 * plain["decoder"]["weight"], rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(mixed["embedding"], 0.5 * plain["embedding"], rtol=1e-3, atol=1e-7)


def test_a_rate_pattern_without_a_match_raises():
    with pytest.raises(ax.ConfigError, match=r"learner\.rates: decodr"):
        Learner.Config(rates={"decodr.**": 0.0}).build(AXES)


def test_case_a_call_of_optax_is_an_optimizer():
    cfg = Learner.Config(optimizer=ax.call(optax.scale_by_adam, b2=0.9), schedule=Constant(rate=0.1), clip_norm=None)
    learner, params, grads = cfg.build(AXES), random_tree(0), random_tree(1)
    state, wanted = learner.init(params), optax.scale_by_adam(b2=0.9)
    moved, _, _ = learner.update(grads, state, params, jnp.asarray(0), jnp.asarray(10))
    steps, _ = wanted.update(grads, wanted.init(params), params)
    jax.tree.map(
        lambda new, old, step: np.testing.assert_allclose(new, old - 0.1 * step, rtol=1e-6), moved, params, steps
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (optax.adamw, "optax.*adamw applies a learning rate, but the learner applies its schedule"),
        (dict, "optimizer builds dict. Set an Optimizer.Config or a call"),
    ],
)
def test_case_a_call_of_something_else_is_refused(function, message):
    options = {"learning_rate": 1e-3} if function is optax.adamw else {}
    with pytest.raises(ax.ConfigError, match=message):
        Learner.Config(optimizer=ax.call(function, **options)).build(AXES)
