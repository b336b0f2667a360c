"""`FeatureSuite` fails for features that are wrong in one way, and passes for a correct one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.nn import Attention, Causal, Embedding, FeedForward, Full, Normal, TransformerLayer, Zeros, edit_layers
from axcore.testing import FeatureSuite

from .wrong import instance, names


class Gate(ax.Layer):
    """Scales the heads by a matrix of learned factors, which starts at 0: `heads * (1 + factors)`."""

    axes = (None, "head")

    class Config(ax.Layer.Config):
        num_heads: int = ax.REQUIRED

    def __init__(self, cfg, *, rngs):
        self.factors = self.param("factors", (2, cfg.num_heads), Zeros(), rngs, axes=self.axes)

    def __call__(self, x, heads):
        return heads + self.change(heads) * self.factors[...].sum(0).astype(heads.dtype)[:, None]

    def change(self, heads):
        return heads


class Average(Gate):
    """Adds the average of all tokens."""

    def change(self, heads):
        return heads.mean(1, keepdims=True)


class Rows(Gate):
    """Adds the average of all rows."""

    def change(self, heads):
        return heads.mean(0, keepdims=True)


class Previous(Gate):
    """Adds the heads of the token before, whatever its document, and stores none for decoding."""

    def change(self, heads):
        return jnp.pad(heads, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]


class Constant(Gate):
    """No gradient reaches the factors."""

    def __call__(self, x, heads):
        return heads * (1 + jax.lax.stop_gradient(self.factors[...].sum(0))[:, None])


class Root(Gate):
    """The gradient of the square root of 0 is infinite."""

    def __call__(self, x, heads):
        return heads * (1 + jnp.sqrt(self.factors[...].sum(0))[:, None])


class Bare(Gate):
    axes = (None, None)


class Coarse(Gate):
    """Rounds to multiples of 2 in bfloat16, and of 3e-5 in float32."""

    def change(self, heads):
        return heads

    def __call__(self, x, heads):
        return super().__call__(x, heads) + 300 - 300


class Dice(Gate):
    """Draws when it is traced."""

    def __call__(self, x, heads):
        return super().__call__(x, heads) * np.random.default_rng().normal(1.0, 0.5)


class Callback(Gate):
    """Has no rule for `vmap`."""

    def __call__(self, x, heads):
        heads = super().__call__(x, heads)
        one = jax.pure_callback(lambda x: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32), heads.sum())
        return heads * jax.lax.stop_gradient(one)


class OwnIndex(ax.Layer):
    """Scales queries by their index in the call, not by their position."""

    def __call__(self, q, k, query_positions, key_positions):
        return q * (1 + jnp.arange(q.shape[1])[None, :, None, None] / 4), k


class Wrapper(ax.Layer):
    class Config(ax.Layer.Config):
        input_dim: int = ax.REQUIRED
        inner: ax.Layer.Config

    def __init__(self, cfg, *, rngs):
        self.inner = self.child("inner", cfg.inner, rngs, input_dim=cfg.input_dim)

    def __call__(self, x, tokens):
        return 1.1 * self.inner(x, tokens)


def output(layer):
    return lambda cfg: ax.select(cfg, Attention).set(output=layer.Config())


def attention(**values):
    return lambda cfg: ax.select(cfg, Attention).set(**values)


def four_windows(cfg):
    scales = [0.1, 0.2, 0.3, 0.4]
    return edit_layers(cfg, Attention, lambda _, node, number: node.set(scale=scales[number]))


def suite(attach, **attributes):
    return instance(FeatureSuite, changes_outputs=False, attach=lambda self, cfg: attach(cfg), **attributes)


CHECKS = {
    "attaching": "test_attaching_returns_a_changed_copy_of_the_config",
    "axes": "test_new_matrices_have_logical_axes",
    "bfloat16": "test_bfloat16_is_close_to_float32",
    "causality": "test_later_tokens_do_not_change_logits",
    "decoding": "test_decoding_equals_recomputation",
    "deeper": "test_a_deeper_model_can_be_trained",
    "documents": "test_documents_of_a_row_are_independent",
    "finite": "test_loss_and_gradients_are_finite_under_jit",
    "gradients": "test_every_parameter_has_a_gradient",
    "initial": "test_initial_values_of_other_parameters_do_not_change",
    "names": "test_names_and_shapes_of_other_parameters_do_not_change",
    "outputs": "test_outputs_change_as_declared",
    "remat": "test_remat_does_not_change_results",
    "rows": "test_rows_of_a_batch_are_independent",
    "vmap": "test_vmap_agrees_with_single_examples",
}
WRONG = {
    "average": (output(Average), "causality", "changes the logits before them"),
    "bare": (output(Bare), "axes", "factors.*replicated"),
    "callback": (output(Callback), "vmap", "vmap"),
    "coarse": (output(Coarse), "bfloat16", "the error of the gradient in bfloat16"),
    "constant": (output(Constant), "gradients", "no gradient reaches.*factors"),
    "dice": (output(Dice), "remat", "Not equal to tolerance"),
    "four windows": (four_windows, "deeper", "index out of range"),
    "full mask": (attention(mask=Full()), "causality", "changes the logits before them"),
    "mask of all documents": (attention(mask=Causal()), "documents", "the document before it"),
    "moves": (lambda cfg: ax.select(cfg, TransformerLayer).wrap(Wrapper.Config(), slot="inner"), "names", "replaces"),
    "nothing": (lambda cfg: cfg, "attaching", "assert"),
    "other loss": (attention(scale=0.3), "outputs", "changes_outputs is False"),
    "own index": (attention(position=OwnIndex.Config()), "decoding", "decoding in steps"),
    "previous, decoding": (output(Previous), "decoding", "decoding in steps"),
    "previous, documents": (output(Previous), "documents", "the document before it"),
    "redraws": (
        lambda cfg: ax.select(cfg, Embedding).set(init=Normal(stddev=0.5)),
        "initial",
        "changes_initialization",
    ),
    "reshapes": (lambda cfg: ax.select(cfg, FeedForward).set(hidden_dim=32), "names", "replaces"),
    "root": (output(Root), "finite", "factors.*NaN or infinities"),
    "rows": (output(Rows), "rows", "Not equal to tolerance"),
}
LONG = ("average", "bare", "moves", "redraws", "reshapes", "nothing", "four windows")


@pytest.mark.parametrize("name", names(WRONG, LONG))
def test_case_a_wrong_feature_fails(name):
    attach, check, message = WRONG[name]
    with pytest.raises(Exception, match=f"(?s){message}"):
        getattr(suite(attach), CHECKS[check])()


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_case_a_correct_feature_passes(check):
    getattr(suite(output(Gate)), CHECKS[check])()


@pytest.mark.long
def test_case_declared_changes_pass_and_unused_declarations_fail():
    moves, _, _ = WRONG["moves"]
    redraws, _, _ = WRONG["redraws"]
    suite(moves, replaces=("decoder.*",)).test_names_and_shapes_of_other_parameters_do_not_change()
    suite(redraws, changes_initialization=("embedding.weight",)).test_initial_values_of_other_parameters_do_not_change()
    suite(output(Bare), replicated=("*.factors",)).test_new_matrices_have_logical_axes()
    with pytest.raises(AssertionError, match=r"replaces contains \['head.*'\]"):
        suite(moves, replaces=("decoder.*", "head.*")).test_names_and_shapes_of_other_parameters_do_not_change()
