"""The conformance suite of a quantizer."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import Rngs, functional
from axcore.nn import Linear
from axcore.plugin import Quantizer, use
from axcore.testing.models import by_path, loss_and_grads, tiny_batch, tiny_model
from axcore.testing.offer import OfferSuite, offered_config

SHAPE = (48, 40)


class QuantizerSuite(OfferSuite):
    """Checks of what fills the quantizer slot of `Linear`.

    Attributes:
        error: the largest relative error of a product of normal numbers, as ||found - exact|| / ||exact||.
        gradient_error: the same of its gradients; None for a quantizer that only serves inference.
        model_error: how far the loss of a small model may move, relative.
    """

    kind = Quantizer
    error: ClassVar[float]
    gradient_error: ClassVar[float | None] = None
    model_error: ClassVar[float] = 0.05

    def config(self) -> Any:
        return ax.pipe(tiny_model(), use(self.name, **self.options))

    def _linear(self, dtype: str = "float32", widths: tuple[int, int] = SHAPE, **options: Any) -> Any:
        cfg = Linear.Config(input_dim=widths[0], output_dim=widths[1], quantizer=offered_config(self), **options)
        return functional(cfg.set(dtypes=ax.DTypes(compute=dtype)).build(rngs=Rngs(0)))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("leading", [(5,), (2, 7), (1,)], ids=str)
    @pytest.mark.parametrize("widths", [SHAPE, (33, 40), (48, 17)], ids=str)
    def test_product_is_close(self, dtype: str, widths: tuple[int, int], leading: tuple[int, ...]) -> None:
        fn, params, state = self._linear(dtype, widths)
        x = jax.random.normal(jax.random.key(1), (*leading, widths[0]), dtype)
        found = jax.jit(lambda params, x: fn(params, state, x)[0][0])(params, x)
        exact = np.asarray(x, np.float64) @ np.asarray(params["weight"], np.float64)
        assert found.dtype == jnp.dtype(dtype)
        assert found.shape == exact.shape
        assert _error(found, exact) < self.error + (0.01 if dtype == "bfloat16" else 0)

    def test_it_does_round(self) -> None:
        fn, params, state = self._linear()
        x = jax.random.normal(jax.random.key(1), (64, SHAPE[0]))
        found = fn(params, state, x)[0][0]
        assert _error(found, np.asarray(x, np.float64) @ np.asarray(params["weight"], np.float64)) > 1e-5

    @pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
    def test_product_does_not_depend_on_the_unit(self, scale: float) -> None:
        fn, params, state = self._linear()
        x = scale * jax.random.normal(jax.random.key(1), (5, SHAPE[0]))
        exact = np.asarray(x, np.float64) @ np.asarray(params["weight"], np.float64)
        assert _error(fn(params, state, x)[0][0], exact) < 1.5 * self.error

    def test_zeros_are_exact_and_nothing_is_nan(self) -> None:
        fn, params, state = self._linear()
        x = jnp.zeros((3, SHAPE[0])).at[1].set(1.0)
        found = fn(params, state, x)[0][0]
        assert np.isfinite(found).all()
        assert not np.any(found[0])
        nothing = fn(jax.tree.map(jnp.zeros_like, params), state, x)[0][0]
        assert not np.any(nothing)

    def test_bias_is_added_after_the_product(self) -> None:
        fn, params, state = self._linear(use_bias=True)
        params = {**params, "bias": jnp.full(SHAPE[1], 1000.0)}
        found = fn(params, state, jnp.zeros((2, SHAPE[0])))[0][0]
        np.testing.assert_array_equal(found, np.full((2, SHAPE[1]), 1000.0))

    def test_gradients_are_close(self) -> None:
        if self.gradient_error is None:
            pytest.skip("declared for inference only")
        fn, params, state = self._linear()
        x = jax.random.normal(jax.random.key(1), (32, SHAPE[0]))
        y_bar = jax.random.normal(jax.random.key(2), (32, SHAPE[1]))

        def scalar(params: Any, x: jax.Array) -> jax.Array:
            return (fn(params, state, x)[0][0] * y_bar).sum()

        grads, x_bar = jax.jit(jax.grad(scalar, argnums=(0, 1)))(params, x)
        wide = [np.asarray(each, np.float64) for each in (x, params["weight"], y_bar)]
        assert _error(grads["weight"], wide[0].T @ wide[2]) < self.gradient_error
        assert _error(x_bar, wide[2] @ wide[1].T) < self.gradient_error

    def test_a_model_computes_nearly_the_same(self) -> None:
        loss, grads = loss_and_grads(self.config(), tiny_batch)
        expected, _ = loss_and_grads(tiny_model(), tiny_batch)
        np.testing.assert_allclose(loss, expected, rtol=self.model_error)
        assert loss != expected, "no linear map of the model was quantized"
        if self.gradient_error is not None:
            dead = [path for path, leaf in by_path(grads).items() if not np.any(leaf)]
            assert not dead, f"no gradient reaches {dead}"

    def test_every_linear_map_is_reached(self) -> None:
        reached = [getattr(node, "quantizer", None) is not None for _, node in ax.select(self.config(), Linear)]
        assert reached
        assert all(reached)


def _error(found: Any, exact: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact))
