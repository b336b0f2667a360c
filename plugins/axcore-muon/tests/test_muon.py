"""Muon against the published algorithm in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import Attention, CausalLM, FeedForward, Linear, Repeat, TransformerLayer
from axcore.train import AdamW, Learner
from axcore_muon.optimizer import Muon, hidden_matrices

AXES = {
    "wide": ("embed", "mlp"),
    "stacked": {"tall": ("layer", "mlp", "embed"), "norm": ("layer", "embed")},
    "experts": ("layer", "expert", "embed", "mlp"),
    "heads": ("embed", "heads", "head_dim"),
    "embedding": ("vocab", "embed"),
    "bias": ("mlp",),
}
SHAPES = {
    "wide": (4, 6),
    "stacked": {"tall": (3, 6, 4), "norm": (3, 4)},
    "experts": (2, 3, 4, 5),
    "heads": (4, 2, 3),
    "embedding": (7, 4),
    "bias": (6,),
}
MATRICES = {"wide": True, "stacked": {"tall": True, "norm": False}, "experts": True, "heads": True} | {
    "embedding": False,
    "bias": False,
}
IS_TUPLE = lambda node: isinstance(node, tuple)  # noqa: E731


def random_tree(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda shape: rng.normal(size=shape).astype(np.float32), SHAPES, is_leaf=IS_TUPLE)


def newton_schulz(g, steps=5, eps=1e-7):
    """The published function of this name, in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (np.linalg.norm(g) + eps)
    if g.shape[0] > g.shape[1]:
        x = x.T
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Reference:
    """One matrix, [fan_in, fan_out], under Muon."""

    def __init__(self, rms, momentum=0.95, nesterov=True, weight_decay=0.1):
        self.rms, self.momentum, self.nesterov, self.weight_decay = rms, momentum, nesterov, weight_decay
        self.buffer = 0.0

    def update(self, g, w):
        self.buffer = self.momentum * self.buffer + g
        g = g + self.momentum * self.buffer if self.nesterov else self.buffer
        fan_in, fan_out = g.shape
        scale = max(1, fan_out / fan_in) ** 0.5 if self.rms is None else self.rms * max(fan_in, fan_out) ** 0.5
        return scale * newton_schulz(g) + self.weight_decay * w


def each_matrix(tree):
    """The matrices [fan_in, fan_out] of a tree, one after the other, in float64."""
    tall, experts = tree["stacked"]["tall"], tree["experts"]
    found = [tree["wide"], *tall, *experts.reshape(-1, 4, 5), tree["heads"].reshape(8, 3)]
    return [np.asarray(matrix, np.float64) for matrix in found]


@pytest.mark.parametrize(
    "options", [{"rms": 0.2}, {"rms": None, "momentum": 0.8, "weight_decay": 0.3}, {"rms": 1.0, "nesterov": False}]
)
def test_updates_match_the_published_algorithm(options):
    learned = Muon.Config(**options, dtype=None).build().transformation(AXES)
    params = random_tree(0)
    state, update = learned.init(params), jax.jit(learned.update)
    references = [Reference(**options) for _ in each_matrix(params)]
    for step in range(3):
        grads = random_tree(step + 1)
        updates, state = update(grads, state, params)
        for found, reference, g, w in zip(
            each_matrix(updates), references, each_matrix(grads), each_matrix(params), strict=True
        ):
            np.testing.assert_allclose(found, reference.update(g, w), rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_others_are_updated_as_without_muon():
    others = AdamW.Config(b2=0.9, weight_decay=0.5)
    both = Muon.Config(others=others, weight_decay=0.0).build().transformation(AXES)
    alone = others.build().transformation(AXES)
    params = random_tree(0)
    states = both.init(params), alone.init(params)
    update = jax.jit(lambda *args: (both.update(args[0], args[1], params), alone.update(args[0], args[2], params)))
    for step in range(2):
        (mixed, one), (plain, two) = update(random_tree(step + 1), *states)
        states = one, two
    same = jax.tree.map(lambda a, b: bool((a == b).all()), mixed, plain)
    assert same == jax.tree.map(lambda is_matrix: not is_matrix, MATRICES)


def test_updates_have_about_the_root_mean_square_of_adamw():
    learned = Muon.Config(weight_decay=0.0).build().transformation({"weight": ("embed", "mlp")})
    params = {"weight": np.random.default_rng(0).normal(size=(96, 32)).astype(np.float32)}
    updates, _ = learned.update(params, learned.init(params), params)
    assert np.sqrt(np.square(updates["weight"]).mean()) == pytest.approx(0.2, rel=0.25)  # singular values are near 1


@pytest.mark.long
def test_a_zero_gradient_gives_a_zero_update():
    learned = Muon.Config(weight_decay=0.0, others=AdamW.Config(weight_decay=0.0)).build().transformation(AXES)
    zero = jax.tree.map(np.zeros_like, random_tree(0))
    updates, _ = jax.jit(learned.update)(zero, learned.init(zero), random_tree(0))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))


def test_state_is_momentum_for_matrices_and_adamw_for_others():
    learned = Muon.Config().build().transformation(AXES)
    found = sorted(leaf.shape for leaf in jax.tree.leaves(learned.init(random_tree(0))))
    momenta, moments = [(4, 6), (3, 6, 4), (2, 3, 4, 5), (4, 2, 3)], [(3, 4), (7, 4), (6,)]
    assert found == sorted([*momenta, *moments, *moments, ()])  # and the count of AdamW


@pytest.mark.long
@pytest.mark.parametrize("held", [np.float32, jnp.bfloat16])
def test_iteration_runs_in_bfloat16_by_default(held):
    params, grads = (jax.tree.map(lambda leaf: leaf.astype(held), random_tree(seed)) for seed in (0, 1))
    learned = Muon.Config(weight_decay=0.0).build().transformation(AXES)
    updates, _ = jax.jit(learned.update)(grads, learned.init(params), params)
    dtypes = jax.tree.map(lambda leaf, is_matrix: leaf.dtype == (held if is_matrix else np.float32), updates, MATRICES)
    assert all(jax.tree.leaves(dtypes))  # AdamW's are float32
    found, expected = updates["wide"], Reference(0.2, weight_decay=0.0).update(each_matrix(grads)[0], 0.0)
    error = np.abs(np.asarray(found, np.float64) - expected).max()
    assert 1e-4 < error < 0.05


def test_hidden_matrices():
    found = jax.tree_util.tree_map_with_path(
        lambda path, axes: hidden_matrices(str(path), axes), AXES, is_leaf=IS_TUPLE
    )
    assert found == MATRICES
    assert not hidden_matrices("convolution", (None, "mlp"))
    assert not hidden_matrices("head", ("embed", "vocab"))
    assert not hidden_matrices("router", ("layer", "embed", "expert"))


def test_model_projections_are_orthogonalized():
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=2, query=Linear.Config(use_bias=True)),
        ffn=FeedForward.Config(hidden_dim=8),
    )
    model = CausalLM.Config(vocab_size=7, dim=8, decoder=Repeat.Config(num_layers=2, layers=layer))
    fn, params, _ = abstract(model.set(head=Linear.Config()))
    learner = Learner.Config(optimizer=Muon.Config()).build(fn.axes)
    muon = jax.eval_shape(learner.init, params)[1].inner_states["muon"]
    paths = {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(muon)}
    found = {path.partition("decoder.layers.")[2] for path in paths}
    attention = {f"attention.{name}.weight" for name in ("query", "key", "value", "projection")}
    assert found == attention | {f"ffn.{name}.weight" for name in params["decoder"]["layers"]["ffn"]}


def test_parameters_can_be_selected_by_path():
    learned = Muon.Config(orthogonalizes=lambda path, axes: path == "stacked.tall").build().transformation(AXES)
    state = learned.init(random_tree(0)).inner_states["muon"]
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(3, 6, 4)]


def test_selecting_a_parameter_that_is_not_a_matrix_names_it():
    with pytest.raises(ax.ConfigError, match=r"learner\.optimizer\.orthogonalizes .* stacked\.norm .*'embed'"):
        Muon.Config(orthogonalizes=lambda path, axes: "norm" in path).build().transformation(AXES)


def test_others_train_everything_if_no_matrix_is_selected():
    params, grads = {"bias": jnp.ones((4,))}, {"bias": jnp.arange(4.0)}
    found, wanted = (
        optimizer.build().transformation({"bias": ("mlp",)}) for optimizer in (Muon.Config(), Muon.Config().others)
    )
    found, wanted = (each.update(grads, each.init(params), params)[0] for each in (found, wanted))
    np.testing.assert_array_equal(found["bias"], wanted["bias"])


def test_an_invalid_dtype_is_rejected_at_construction():
    with pytest.raises(ax.ConfigError, match="'float17' is not a dtype"):
        Muon.Config(dtype="float17")
