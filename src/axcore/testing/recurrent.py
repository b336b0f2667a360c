"""The conformance suite of layers that keep state between decoding calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from axcore.module import Functional, Layer, Rngs, Tree, functional
from axcore.nn import CachedBlocks, CachedRows, ContiguousCache, TokenInfo, for_decoding
from axcore.testing.causality import with_noise
from axcore.testing.models import by_path

ROWS, SEQ = 3, 11


class RecurrentSuite:
    """Checks of a layer with decoding state that is called as `(x, tokens) -> y`, such as an `axcore.nn.Recurrent`.

    ```python
    class TestDifference(RecurrentSuite):
        def config(self):
            return Difference.Config(input_dim=6)

        def reference(self, params, x):  # params: path -> float64 array
            return x - np.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    ```

    Attributes:
        tolerance: the largest error of float32 outputs of order 1.
        max_rollback: the number of last tokens that decoding can replace.
    """

    tolerance: ClassVar[float] = 2e-5
    max_rollback: ClassVar[int] = 2

    def config(self) -> Layer.Config:
        """The config of the layer for training, with the field `input_dim`."""
        raise NotImplementedError

    def reference(self, params: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        """The outputs of rows [rows, seq, input_dim] that are one document each, in NumPy float64."""
        raise NotImplementedError

    def test_outputs_equal_the_formula(self) -> None:
        x = self._x()
        found = _run(self._trained()[0])(*self._trained()[1:], x, _tokens(np.arange(SEQ)[None]))[0]
        self._close(found, self._expected(x))

    def test_gradients_equal_those_of_the_formula(self) -> None:
        """Those of the inputs and of each parameter, along a random direction, by central differences in float64."""
        random, x, (fn, params, state) = np.random.default_rng(1), self._x(), self._trained()
        wide = {path: np.asarray(leaf, np.float64) for path, leaf in by_path(params).items()}
        weights = random.normal(size=self._expected(x).shape)

        @jax.jit
        @functools.partial(jax.grad, argnums=(0, 1))
        def gradients(params: Tree, x: jax.Array) -> jax.Array:
            y = fn(params, state, x, _tokens(np.arange(SEQ)[None]))[0][0]
            return (y * weights).sum()

        of_params, of_x = gradients(params, jnp.asarray(x))
        at = {"the inputs": np.asarray(x, np.float64), **wide}

        def loss(values: dict[str, np.ndarray]) -> float:
            held = {path: values[path] for path in wide}
            return float((self.reference(held, values["the inputs"]) * weights).sum())

        for path, gradient in {"the inputs": of_x, **by_path(of_params)}.items():
            direction = random.normal(size=gradient.shape)
            ahead, behind = (loss(at | {path: at[path] + step * direction}) for step in (1e-5, -1e-5))
            terms = np.asarray(gradient, np.float64) * direction
            error, bound = abs(terms.sum() - (ahead - behind) / 2e-5), 50 * self.tolerance * (1 + abs(terms).sum())
            assert error <= bound, f"the gradient of {path} differs from that of the formula: {error:.2g} > {bound:.2g}"

    def test_packed_documents_equal_separate_rows(self) -> None:
        x = self._x()
        segments = np.array([[1] * 4 + [2] * 2 + [5] * 5, [1] * SEQ, [3] + [4] * (SEQ - 1)])
        tokens = _tokens(np.arange(SEQ)[None], segment_ids=jnp.asarray(segments))
        found = _run(self._trained()[0])(*self._trained()[1:], x, tokens)[0]
        for row, numbers in enumerate(segments):
            for number in np.unique(numbers):
                at = numbers == number
                self._close(found[row : row + 1, at], self._expected(x[row : row + 1, at]))

    def test_steps_of_any_width_equal_one_call(self) -> None:
        """Steps wider and narrower than what can be replaced, with padding, and rows without tokens."""
        x = self._x()
        wanted = self._expected(x)
        for max_rollback in (0, self.max_rollback):
            call, state, lengths = *self._decoding(max_rollback), np.zeros(ROWS, int)
            for counts in ((6, 1, 0), (1, 1, 1), (0, 3, 2), (4, 6, 3), (0, 0, 5)):
                found, state = call(state, *_part(x, lengths, counts, max(counts)))
                for row, count in enumerate(counts):
                    start, lengths[row] = lengths[row], lengths[row] + count
                    self._close(found[row, :count], wanted[row, start : start + count])

    def test_the_last_tokens_can_be_replaced(self) -> None:
        """After a step with wrong tokens at its end, a step begins before them."""
        x, most = self._x(), self.max_rollback
        wanted, empty = self._expected(x), np.zeros(ROWS, int)
        call, first = self._decoding(most)
        for width in range(1, 7):
            start = np.array([0, 4, 5])
            _, state = call(first, *_part(x, empty, start, 5))
            back, wrong = np.minimum([1, most, 0], width), np.array(x)
            for row in range(ROWS):
                wrong[row, start[row] + width - back[row] :] = 7.0
            _, state = call(state, *_part(wrong, start, [width] * ROWS, width))
            start = start + width - back
            counts = np.minimum(4, SEQ - start)
            found, _ = call(state, *_part(x, start, counts, 4))
            for row, count in enumerate(counts):
                self._close(found[row, :count], wanted[row, start[row] : start[row] + count])

    def test_a_row_that_starts_again_sees_nothing_of_the_previous_one(self) -> None:
        """Not even NaN."""
        x, empty = self._x(), np.zeros(ROWS, int)
        call, state = self._decoding(self.max_rollback)
        _, state = call(state, *_part(np.full_like(x, np.nan), empty, [6] * ROWS, 6))
        found, _ = call(state, *_part(x, empty, [6] * ROWS, 6))
        self._close(found, self._expected(x[:, :6]))

    def test_a_row_that_cannot_go_on_is_nan_and_keeps_its_state(self) -> None:
        """A row that leaves tokens out, and one that replaces more tokens than it can."""
        x, most = self._x(), self.max_rollback
        wanted = self._expected(x)
        call, state = self._decoding(most)
        _, state = call(state, *_part(x, np.zeros(ROWS, int), [5] * ROWS, 5))
        found, state = call(state, *_part(x, np.array([6, 5 - most - 1, 5]), [2] * ROWS, 2))
        assert np.isnan(found[:2]).all(), "a row that does not continue its state must be NaN"
        start = np.array([5, 5 - most, 7])
        found, _ = call(state, *_part(x, start, [2] * ROWS, 2))
        for row in range(ROWS):
            self._close(found[row], wanted[row, start[row] : start[row] + 2])

    def test_rows_of_several_widths_in_one_call(self) -> None:
        """One call decodes two rows and computes a part of a prompt; then all rows go on."""
        x, slots = self._x(), np.array([2, 0])
        wanted = self._expected(x)
        for max_rollback in (0, self.max_rollback):
            call, state = self._decoding(max_rollback)
            _, state = call(state, *_part(x[slots], np.zeros(2, int), [4, 4], 4, slots))
            parts = (
                _part(x[slots], np.array([4, 4]), [1, 1], 1, slots),
                _part(x[1:2], np.zeros(1, int), [5], 6, np.array([1])),
            )
            index, valid = (_flat([getattr(each, name) for _, each in parts]) for name in ("index", "valid"))
            tokens = _tokens(index, valid, cached=CachedBlocks(tuple(each for _, each in parts)))
            found, state = call(state, _flat([part for part, _ in parts]), tokens)
            self._close(found[0, :2], wanted[slots, 4])
            self._close(found[0, 2:7], wanted[1, :5])
            found, _ = call(state, *_part(x, np.full(ROWS, 5), [2] * ROWS, 2))
            self._close(found, wanted[:, 5:7])

    def _x(self) -> np.ndarray:
        shape = ROWS, SEQ, getattr(self.config(), "input_dim")  # noqa: B009 - a field of the layer
        return np.random.default_rng(0).normal(size=shape).astype(np.float32)

    def _trained(self) -> tuple[Functional, Tree, Tree]:
        fn, params, state = functional(self.config().build(rngs=Rngs(0)))
        return fn, with_noise(params), state

    def _expected(self, x: np.ndarray) -> np.ndarray:
        wide = {path: np.asarray(leaf, np.float64) for path, leaf in by_path(self._trained()[1]).items()}
        return self.reference(wide, np.asarray(x, np.float64))

    def _decoding(self, max_rollback: int) -> tuple[Callable[..., tuple[jax.Array, Tree]], Tree]:
        """A function `(state, x, tokens) -> (y, state)` of the layer for decoding, and its initial state."""
        sizes = {"batch_size": ROWS, "max_len": SEQ, "max_rollback": max_rollback}
        cfg = for_decoding(self.config(), cache=ContiguousCache.Config(), **sizes)
        fn, _, state = functional(cfg.build(rngs=Rngs(0)))
        params = self._trained()[1]

        def call(state: Tree, x: np.ndarray, tokens: TokenInfo) -> tuple[jax.Array, Tree]:
            return _run(fn)(params, state, x, tokens)

        return call, state

    def _close(self, found: Any, expected: np.ndarray) -> None:  # Any: an array of jax or NumPy
        np.testing.assert_allclose(found, expected, rtol=self.tolerance, atol=self.tolerance)


def _run(fn: Functional) -> Callable[..., tuple[jax.Array, Tree]]:
    return functools.partial(_jitted, fn)


@functools.partial(jax.jit, static_argnums=0)
def _jitted(fn: Functional, params: Tree, state: Tree, x: jax.Array, tokens: TokenInfo) -> tuple[jax.Array, Tree]:
    (y, _), new = fn(params, state, x, tokens)
    return y, new


def _part(
    x: np.ndarray, start: np.ndarray, lengths: Any, width: int, slots: np.ndarray | None = None
) -> tuple[np.ndarray, TokenInfo]:
    """The next tokens of rows, [rows, width], with padding of large values after them."""
    index = start[:, None] + np.arange(width)
    valid = np.arange(width) < np.asarray(lengths)[:, None]
    found = np.take_along_axis(x, np.clip(index, 0, SEQ - 1)[..., None], axis=1)
    places, stop = np.arange(SEQ)[None], start + np.asarray(lengths)
    held = _tokens(places, places < stop[:, None])
    rows = CachedRows(held, jnp.asarray(stop), None if slots is None else jnp.asarray(slots))
    return np.where(valid[..., None], found, 1e6), _tokens(index, valid, cached=rows)


def _tokens(index: np.ndarray, valid: np.ndarray | None = None, **fields: Any) -> TokenInfo:  # Any: as in `TokenInfo`
    array = jnp.asarray(index)
    return TokenInfo(array, array, valid=None if valid is None else jnp.asarray(valid), **fields)


def _flat(parts: list[Any]) -> np.ndarray:
    return np.concatenate([each.reshape(1, -1, *each.shape[2:]) for each in parts], axis=1)
