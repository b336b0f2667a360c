"""`NumericsSuite` passes for correct numerics, with and without state, and fails for each kind of error."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import axcore as ax
from axcore.module import GradientState
from axcore.numerics import Numerics
from axcore.testing import NumericsSuite, tiny_model

from .wrong import instance


class Right(Numerics):
    """8-bit weights while training and stored; inputs are quantized by the largest value of the previous step."""

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.largest = GradientState(jnp.zeros(()), axes=())

    def encode(self, weight):
        scales = jnp.abs(weight).max(self.config.input_axis, keepdims=True).astype(jnp.float32) / 127
        scales = jnp.where(scales == 0, 1, scales)
        return {"codes": jnp.round(weight / scales).astype(jnp.int8), "scales": scales}

    def decode(self, stored):
        return stored["codes"] * stored["scales"]

    def matrix(self, weight):
        if isinstance(weight, dict):
            return self.decode(weight)
        return weight + jax.lax.stop_gradient(self.decode(self.encode(weight)).astype(weight.dtype) - weight)

    def __call__(self, x, weight, product):
        return product(on_grid(x, self.largest[...]), self.matrix(weight), self.dtypes.accumulate)


@jax.custom_vjp
def on_grid(x, largest):
    scale = jnp.where(largest > 0, largest / 127, 2**-7)
    return (jnp.round(x / scale) * scale).astype(x.dtype)


on_grid.defvjp(lambda x, largest: (on_grid(x, largest), jnp.abs(x).max().astype(jnp.float32)), lambda new, g: (g, new))


class OneProduct(Right):
    """Ignores `product` and always computes `x @ weight`."""

    def __call__(self, x, weight, product):
        return x @ self.matrix(weight).astype(x.dtype)


class Exact(Right):
    def __call__(self, x, weight, product):
        return product(x, weight)


class NoGradient(Right):
    def matrix(self, weight):
        return jax.lax.stop_gradient(super().matrix(weight))


class OtherMatrix(Right):
    """`matrix` differs from the matrix that products use."""

    def __call__(self, x, weight, product):
        return product(x, super().matrix(weight))

    def matrix(self, weight):
        return 2 * super().matrix(weight)


class FloatCopy(Right):
    def encode(self, weight):
        return {**super().encode(weight), "weight": weight}


class WideCodes(Right):
    def encode(self, weight):
        stored = super().encode(weight)
        return {**stored, "codes": stored["codes"].astype(jnp.int32)}


class WrongScales(Right):
    """Computes different results from stored weights."""

    def __call__(self, x, weight, product):
        return super().__call__(x, weight, product) * (2 if isinstance(weight, dict) else 1)


class Writes(Right):
    """Writes state in the forward pass."""

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros(()), axes=())

    def __call__(self, x, weight, product):
        self.seen[...] = jnp.maximum(self.seen[...], jnp.abs(x).max())
        return super().__call__(x, weight, product)


class Wider(Right):
    """Returns float32 for bfloat16, and NaN."""

    def __call__(self, x, weight, product):
        return product(x.astype(jnp.float32), self.matrix(weight)) + jnp.nan


class RowsOfNothing(Right):
    def gather(self, ids, weight):
        return 0 * super().gather(ids, weight)


def suite(cls):
    def config(self):
        return ax.select(tiny_model(), lambda _, node: hasattr(node, "numerics")).set(numerics=cls.Config())

    bounds = {"error": 0.02, "gradient_error": 0.02, "stored_bits": 10.0}
    return instance(NumericsSuite, filler=lambda self: cls.Config(), config=config, **bounds)


CHECKS = [
    ("test_product_is_close", "grouped", "bfloat16"),
    ("test_product_is_close", "tied_head", "float32"),
    ("test_product_is_rounded",),
    ("test_products_with_zeros_are_exact", "linear"),
    ("test_gathered_rows_are_close",),
    ("test_products_use_matrix", "batched"),
    ("test_gradients_are_close", "linear"),
    ("test_stored_weights_are_small_and_give_the_same_results", "grouped_in_blocks"),
    ("test_only_gradients_change_state",),
]
WRONG = {
    OneProduct: {"test_product_is_close"},
    Exact: {"test_product_is_rounded"},
    NoGradient: {"test_gradients_are_close"},
    OtherMatrix: {"test_products_use_matrix"},
    FloatCopy: {"test_stored_weights_are_small_and_give_the_same_results"},
    WideCodes: {"test_stored_weights_are_small_and_give_the_same_results"},
    WrongScales: {"test_stored_weights_are_small_and_give_the_same_results"},
    Writes: {"test_only_gradients_change_state"},
    Wider: {"test_products_with_zeros_are_exact"},
    RowsOfNothing: {"test_gathered_rows_are_close"},
}


def failing(cls, checks):
    found = set()
    for name, *arguments in checks:
        try:
            getattr(suite(cls), name)(*arguments)
        except Exception:
            found.add(name)
    return found


@pytest.mark.slow
def test_case_correct_numerics_pass():
    assert not failing(Right, [*CHECKS, ("test_state_is_updated_once_per_step_under_scan_and_remat",)])


@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_case_wrong_numerics_fail(cls):
    names = WRONG[cls]
    assert failing(cls, [check for check in CHECKS if check[0] in names]) == names
