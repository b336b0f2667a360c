"""The conformance suite of a layer."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.config import content_hash, from_json, to_json
from axcore.module import Layer, Rngs, Tree, functional, scan, stack
from axcore.testing.causality import with_noise
from axcore.testing.declared import check_declared
from axcore.testing.models import by_path, without_axes


class LayerSuite:
    """Checks of a layer against a formula in NumPy float64.

    ```python
    class TestScale(LayerSuite):
        def config(self):
            return Scale.Config(input_dim=6)

        def inputs(self, random):
            return (random.normal(size=(2, 3, 6)),)

        def reference(self, params, x):  # params: path -> float64 array
            return x * params["scale"]
    ```

    If the layer returns a tuple of arrays, `reference` returns a tuple too.

    Attributes:
        tolerance: dtype of the activations -> largest error of outputs of order 1.
        maps_to_itself: whether the output is an array that can be the first input of the next layer in a stack.
        training: the value of `self.training` in the layer.
        tokens: how the outputs at a token depend on the other tokens of its row, which are axis 1 of inputs and
            outputs. `apart`: on none, so a single decoded token gives the same outputs. `causal`: on earlier tokens.
            `mixed`: on all, or axis 1 does not contain tokens.
        mixes_rows: whether the outputs of a row, which is axis 0, depend on other rows.
        replicated: patterns of the paths of matrices without logical axes, which every device holds whole.
    """

    tolerance: ClassVar[Mapping[str, float]] = {"float32": 2e-5, "bfloat16": 4e-2}
    maps_to_itself: ClassVar[bool] = False
    training: ClassVar[bool] = False
    tokens: ClassVar[Literal["apart", "causal", "mixed"]] = "apart"
    mixes_rows: ClassVar[bool] = False
    replicated: ClassVar[tuple[str, ...]] = ()

    def config(self) -> Layer.Config:
        """The config of the layer, including the widths that a parent would pass."""
        raise NotImplementedError

    def inputs(self, random: np.random.Generator) -> tuple[np.ndarray, ...]:
        """The arguments of the call. Float arrays are cast to the dtype of each check."""
        raise NotImplementedError

    def reference(self, *args: Any, **kwargs: Any) -> np.ndarray | tuple[np.ndarray, ...]:
        """The formula, `(params, *inputs) -> output`, in NumPy float64. `params` contains the parameters by path."""
        raise NotImplementedError

    def test_outputs_equal_the_formula(self) -> None:
        for dtype, tolerance in self.tolerance.items():
            call, params, inputs = self._case(dtype)
            found = jax.jit(call)(params, *inputs)
            expected = self._expected(_wide(params), *map(_float64, inputs))
            assert [each.shape for each in found] == [each.shape for each in expected]
            for each, formula in zip(found, expected, strict=True):
                np.testing.assert_allclose(np.asarray(each, np.float64), formula, rtol=tolerance, atol=tolerance)

    def test_gradients_equal_the_formula(self) -> None:
        call, params, inputs = self._case("float32")
        random = np.random.default_rng(7)
        weights = [random.normal(size=each.shape) for each in self._expected(_wide(params), *map(_float64, inputs))]
        float_inputs = [i for i, each in enumerate(inputs) if jnp.issubdtype(each.dtype, jnp.floating)]

        def scalar(params: Tree, *chosen: jax.Array) -> jax.Array:
            every = list(inputs)
            for index, value in zip(float_inputs, chosen, strict=True):
                every[index] = value
            return _weighted(call(params, *every), weights)

        chosen = [inputs[index] for index in float_inputs]
        grads = jax.jit(jax.grad(scalar, argnums=tuple(range(1 + len(float_inputs)))))(params, *chosen)
        found = {
            **by_path(grads[0]),
            **{f"input {index}": grad for index, grad in zip(float_inputs, grads[1:], strict=True)},
        }
        for name, grad in found.items():
            direction = random.normal(size=grad.shape)

            def moved(sign: int, name: str = name, direction: np.ndarray = direction) -> float:
                step, wide, every = sign * 1e-5 * direction, _wide(params), [_float64(each) for each in inputs]
                if name in wide:
                    wide[name] = wide[name] + step
                else:
                    index = int(name.removeprefix("input "))
                    every[index] = every[index] + step
                return float(_weighted(self._expected(wide, *every), weights))

            slope, expected = (np.asarray(grad, np.float64) * direction).sum(), (moved(1) - moved(-1)) / 2e-5
            size = np.linalg.norm(np.asarray(grad, np.float64)) + 1e-2 * np.sqrt(grad.size)
            np.testing.assert_allclose(slope, expected, rtol=1e-3, atol=1e-3 * size, err_msg=name)

    def test_rows_are_independent(self) -> None:
        if self.mixes_rows:
            pytest.skip("mixes_rows is True")
        call, params, inputs = self._case("float32")
        run, rows = jax.jit(call), len(inputs[0])
        changed = [_changed(each, np.s_[1:]) if len(each) == rows else each for each in inputs]
        for found, expected in zip(run(params, *changed), run(params, *inputs), strict=True):
            _close(found[:1], expected[:1], "the outputs of row 0 depend on the other rows; see mixes_rows")

    def test_tokens_depend_on_other_tokens_as_declared(self) -> None:
        call, params, inputs = self._case("float32")
        if self.tokens == "mixed" or inputs[0].ndim < 2:
            pytest.skip("tokens is 'mixed', or the first input has no axis 1")
        run, length = jax.jit(call), inputs[0].shape[1]
        plain = run(params, *inputs)

        def has_tokens(each: jax.Array) -> bool:
            return each.ndim > 1 and each.shape[1] == length

        for number in range(1, length):
            later = [_changed(each, np.s_[:, number:]) if has_tokens(each) else each for each in inputs]
            for found, expected in zip(run(params, *later), plain, strict=True):
                if has_tokens(expected):
                    message = f"the outputs before token {number} depend on later tokens; see the attribute tokens"
                    _close(found[:, :number], expected[:, :number], message)
        if self.tokens == "apart":
            last = [each[:, -1:] if has_tokens(each) else each for each in inputs]
            for found, expected in zip(run(params, *last), plain, strict=True):
                if has_tokens(expected):
                    message = "the outputs of the last token differ if it is called alone; see the attribute tokens"
                    _close(found, expected[:, -1:], message)

    def test_vmap_and_remat_do_not_change_results(self) -> None:
        call, params, inputs = self._case("float32")
        plain = jax.jit(call)(params, *inputs)
        again = jax.jit(jax.checkpoint(call))(params, *inputs)
        several = jax.tree.map(lambda x: jnp.stack([x, x]), inputs)
        mapped = jax.jit(jax.vmap(functools.partial(call, params)))(*several)
        for one, other, both in zip(plain, again, mapped, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(both, jnp.stack([one, one]), rtol=1e-5, atol=1e-5)

    def test_a_scanned_stack_equals_a_loop(self) -> None:
        if not self.maps_to_itself:
            pytest.skip("maps_to_itself is False")

        class Stack(ax.Layer):
            class Config(ax.Layer.Config):
                each: ax.Layer.Config

            def __init__(self, cfg: Config, *, rngs: Rngs):
                self.each = stack(lambda rngs: self.build_child(cfg.each, rngs), rngs.at("each"), 3)

            def __call__(self, x: jax.Array, *args: object) -> jax.Array:
                return scan(self.each, x, *args, count=3)

        fn, params, state = functional(Stack.Config(each=self.config()).build(rngs=Rngs(0)))
        _, _, (x, *args) = self._case("float32")
        found = jax.jit(lambda params: fn(params, state, x, *args, key=jax.random.key(3))[0][0])(params)
        alone, _, rest = functional(self.config().build(rngs=Rngs(0)))
        for index in range(3):
            own = jax.tree.map(lambda leaf, i=index: leaf[i], params["each"]) if params else {}
            (x, _), _ = alone(own, rest, x, *args, key=jax.random.key(3))
        np.testing.assert_allclose(found, x, rtol=1e-4, atol=1e-4)

    def test_parameters_have_logical_axes(self) -> None:
        fn, params, _ = functional(self.config().build(rngs=Rngs(0)))
        bare = without_axes(params, fn.axes)
        check_declared("replicated", self.replicated, bare, "matrices without logical axes cannot be sharded")

    def test_config_survives_json(self) -> None:
        cfg = self.config()
        assert from_json(to_json(cfg)) == cfg
        assert content_hash(from_json(to_json(cfg))) == content_hash(cfg)

    def _expected(self, *args: object) -> tuple[np.ndarray, ...]:
        return _several(self.reference(*args))

    def _case(self, dtype: str) -> tuple[Callable[..., tuple[jax.Array, ...]], Tree, tuple[jax.Array, ...]]:
        """The call `(params, *inputs) -> outputs`, with its arguments."""
        cfg = self.config().set(dtypes=ax.DTypes(compute=dtype))
        fn, params, state = functional(cfg.build(rngs=Rngs(0)))
        params = with_noise(params)

        def cast(each: np.ndarray) -> jax.Array:
            array = jnp.asarray(each)
            return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array

        def call(params: Tree, *inputs: jax.Array) -> tuple[jax.Array, ...]:
            (output, _), _ = fn(params, state, *inputs, key=jax.random.key(3), training=self.training)
            return _several(output)

        return call, params, tuple(map(cast, self.inputs(np.random.default_rng(0))))


def _changed(x: jax.Array, at: Any) -> jax.Array:  # Any: what may index an array
    """The input with other values at an index: numbers are increased, and indices are reversed, to stay in range."""
    other = x + 1 if jnp.issubdtype(x.dtype, jnp.floating) else x[:, ::-1] if x.ndim > 1 else x[::-1]
    return x.at[at].set(other[at])


def _close(found: jax.Array, expected: jax.Array, message: str) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=message)


def _several[A](output: A | tuple[A, ...]) -> tuple[A, ...]:
    return output if isinstance(output, tuple) else (output,)


def _weighted[A: (np.ndarray, jax.Array)](outputs: tuple[A, ...], weights: list[np.ndarray]) -> A:
    """The weighted sum of all outputs."""
    terms = [(output * weight).sum() for output, weight in zip(outputs, weights, strict=True)]
    return functools.reduce(operator.add, terms)


def _wide(params: Tree) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf, np.float64) for path, leaf in by_path(params).items()}


def _float64(x: np.ndarray | jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)
