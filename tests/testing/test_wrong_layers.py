"""`LayerSuite` fails for layers that are wrong in one way, and passes for a correct one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.nn import Ones
from axcore.testing import LayerSuite

from .wrong import instance


class Scale(ax.Layer):
    """`(x @ weight) * scale`."""

    axes = ("embed", None)

    class Config(ax.Layer.Config):
        input_dim: int = ax.REQUIRED

    def __init__(self, cfg, *, rngs):
        self.weight = self.param("weight", (cfg.input_dim, cfg.input_dim), Ones(), rngs, axes=self.axes)
        self.scale = self.param("scale", (cfg.input_dim,), Ones(), rngs, axes=("embed",))

    def __call__(self, x):
        return self.product(x) * self.scale[...].astype(x.dtype)

    def product(self, x):
        return x @ self.weight[...].astype(x.dtype)


class Twice(Scale):
    def __call__(self, x):
        return 2 * super().__call__(x)


class OffByAPermille(Scale):
    def __call__(self, x):
        return 1.001 * super().__call__(x)


class Narrow(Scale):
    """Computes in float16, which overflows at 65504."""

    def product(self, x):
        return super().product((x * 3e4).astype(jnp.float16)).astype(x.dtype) / 3e4


class Shape(Scale):
    def __call__(self, x):
        return super().__call__(x)[None]


@jax.custom_vjp
def backward_times_1_3(x):
    return x


backward_times_1_3.defvjp(lambda x: (x, None), lambda _, g: (1.3 * g,))


class Gradient(Scale):
    """The gradients of the input and of the matrix are 1.3 times too large."""

    def product(self, x):
        return backward_times_1_3(super().product(x))


class OneGradient(Scale):
    """The gradient of the scale is zero."""

    def __call__(self, x):
        return self.product(x) * jax.lax.stop_gradient(self.scale[...]).astype(x.dtype)


class Later(Scale):
    """Adds the average of all tokens; so does the formula."""

    def product(self, x):
        return super().product(x + x.mean(1, keepdims=True))


class Earlier(Scale):
    """Adds the sum of the earlier tokens; so does the formula."""

    def product(self, x):
        return super().product(jnp.cumsum(x, axis=1))


class Place(Scale):
    """Depends on the index of a token in the call; so does the formula."""

    def product(self, x):
        return super().product(x) * (1 + jnp.arange(x.shape[1], dtype=x.dtype))[:, None]


class Rows(Scale):
    """Adds the average of all rows; so does the formula."""

    def product(self, x):
        return super().product(x + x.mean(0, keepdims=True))


class Bare(Scale):
    axes = (None, None)


class Unmapped(Scale):
    """Has no rule for `vmap`."""

    def product(self, x):
        one = jax.pure_callback(lambda x: np.float32(1), jax.ShapeDtypeStruct((), jnp.float32), x.sum())
        return super().product(x) * jax.lax.stop_gradient(one).astype(x.dtype)


class Lambda(Scale):
    class Config(Scale.Config):
        function: object = None


def plus(mix):
    return lambda params, x: mix(x) @ params["weight"] * params["scale"]


def right(params, x):
    return x @ params["weight"] * params["scale"]


def place(params, x):
    return right(params, x) * (1 + np.arange(x.shape[1]))[:, None]


def suite(layer, formula=right, **attributes):
    cfg = layer.Config(input_dim=6)
    return instance(
        LayerSuite,
        config=lambda self: cfg.set(function=lambda x: x) if layer is Lambda else cfg,
        inputs=lambda self, random: (random.normal(size=(2, 3, 6)),),
        reference=lambda self, params, x: formula(params, x),
        **attributes,
    )


CHECKS = {
    "axes": "test_parameters_have_logical_axes",
    "gradients": "test_gradients_equal_the_formula",
    "json": "test_config_survives_json",
    "outputs": "test_outputs_equal_the_formula",
    "rows": "test_rows_are_independent",
    "tokens": "test_tokens_depend_on_other_tokens_as_declared",
    "vmap": "test_vmap_and_remat_do_not_change_results",
}
WRONG = {
    "bare": (suite(Bare), "axes", "weight"),
    "earlier": (suite(Earlier, plus(lambda x: x.cumsum(1))), "tokens", "called alone"),
    "gradient": (suite(Gradient), "gradients", "Not equal to tolerance"),
    "lambda": (suite(Lambda), "json", "not registered"),
    "later": (suite(Later, plus(lambda x: x + x.mean(1, keepdims=True))), "tokens", "depend on later tokens"),
    "narrow": (suite(Narrow), "outputs", "Not equal to tolerance"),
    "off by a permille": (suite(OffByAPermille), "outputs", "Not equal to tolerance"),
    "one gradient": (suite(OneGradient), "gradients", "scale"),
    "place": (suite(Place, place), "tokens", "called alone"),
    "rows": (suite(Rows, plus(lambda x: x + x.mean(0, keepdims=True))), "rows", "other rows"),
    "shape": (suite(Shape), "outputs", "1, 2, 3, 6"),
    "twice": (suite(Twice), "outputs", "Not equal to tolerance"),
    "unmapped": (suite(Unmapped), "vmap", "vmap"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG)
def test_case_a_wrong_layer_fails(name):
    wrong, check, message = WRONG[name]
    with pytest.raises(Exception, match=f"(?s){message}"):
        getattr(wrong, CHECKS[check])()


@pytest.mark.long
@pytest.mark.parametrize("check", CHECKS)
def test_case_a_correct_layer_passes(check):
    getattr(suite(Scale), CHECKS[check])()


@pytest.mark.long
def test_case_declared_layers_pass():
    suite(Earlier, plus(lambda x: x.cumsum(1)), tokens="causal").test_tokens_depend_on_other_tokens_as_declared()
    suite(Bare, replicated=("weight",)).test_parameters_have_logical_axes()
    with pytest.raises(AssertionError, match="replicated contains"):
        suite(Scale, replicated=("weight",)).test_parameters_have_logical_axes()
