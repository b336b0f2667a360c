"""Layers that continue rows from a state pass their suite; errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import ContextError
from axcore.nn import Documents, Recurrent, TokenInfo, Windowed
from axcore.nn.windowed import LaggedInputs
from axcore.testing import RecurrentSuite
from axcore.testing.recurrent import ROWS, _part

pytestmark = pytest.mark.long
DECAY, REACH = 0.5, 3


class Average(Recurrent):
    """y_t = decay y_{t-1} + x_t. Reports values for each part of a call."""

    class Config(Recurrent.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED

    def __init__(self, cfg, *, rngs):
        self.carry("last", (cfg.input_dim,), axes=("embed",))

    def __call__(self, x, tokens):
        return self.recur(tokens, x)

    def advance(self, before, documents, x):
        self.add_summary("largest", jnp.abs(x).max(), ax.Reduce.MAX)

        def step(last, now):
            x, is_token, begins = now
            new = jnp.where(begins, 0, DECAY)[:, None] * last + x
            return jnp.where(is_token[:, None], new, last), new

        valid = jnp.ones(x.shape[:2], bool) if documents.valid is None else documents.valid
        numbers = jnp.zeros(x.shape[:2], int) if documents.numbers is None else documents.numbers
        begins = jnp.diff(numbers, axis=1, prepend=0) > 0
        last, y = jax.lax.scan(step, before["last"], (jnp.moveaxis(x, 1, 0), valid.T, begins.T))
        return jnp.moveaxis(y, 0, 1), {"last": last}


class Last(Windowed):
    """y_t = sum of decay^lag x_{t-lag}, for the last few tokens."""

    class Config(Windowed.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED

    def __init__(self, cfg, *, rngs):
        self.remember(REACH, cfg.input_dim, axis="embed")

    def __call__(self, x, tokens):
        inputs = self.lagged(x, tokens)
        return sum(DECAY**lag * inputs[lag] for lag in range(REACH + 1))


class TestRecurrent(RecurrentSuite):
    def config(self):
        return Average.Config(input_dim=2)

    def reference(self, params, x, reach=None):
        lags = range(x.shape[1] if reach is None else min(reach + 1, x.shape[1]))
        return sum(np.pad(DECAY**lag * x, ((0, 0), (lag, 0), (0, 0)))[:, : x.shape[1]] for lag in lags)


class TestWindowed(TestRecurrent):
    max_rollback = 3

    def config(self):
        return Last.Config(input_dim=2)

    def reference(self, params, x, reach=REACH):
        return super().reference(params, x, reach)


@pytest.mark.parametrize("max_rollback", [0, 3])
def test_a_row_without_tokens_is_finite(max_rollback):
    """NaN there would reach other rows where a layer scales a whole tensor, as dynamic FP8 does."""
    call, state = TestWindowed()._decoding(max_rollback)
    x, start = np.ones((ROWS, 7, 2), np.float32), np.full(ROWS, 5)
    _, state = call(state, *_part(x, 0 * start, start, 5))
    found, _ = call(state, *_part(x, start, [2, 0, 2], 2))
    assert np.isfinite(found).all()


@pytest.mark.parametrize("lag", [-1, REACH + 1])
def test_lags_that_were_not_declared_raise(lag):
    x = jnp.ones((2, 5, 2))
    inputs = LaggedInputs(TokenInfo.of(x[..., 0]), REACH, (x,), (Documents(),), (None,))
    with pytest.raises(IndexError, match=rf"lag={lag} must be from 0 to max_lag=3\. Call remember"):
        inputs[lag]


def test_errors():
    call, state = TestRecurrent()._decoding(0)
    x = np.zeros((ROWS, 3, 2), np.float32)
    with pytest.raises(ContextError, match=r"must be called through axcore.infer.Decoder"):
        call(state, x, TokenInfo.of(x[..., 0]))
    with pytest.raises(ax.ConfigError, match="Average keeps the state of batch_size=3 rows but was called with 2"):
        call(state, *_part(x[:2], np.zeros(2, int), [1, 1], 1))
    x, tokens = _part(x, np.zeros(ROWS, int), [1] * ROWS, 1)
    with pytest.raises(ax.ConfigError, match="Average was given segment_ids while decoding"):
        call(state, x, dataclasses.replace(tokens, segment_ids=np.ones((ROWS, 1), int)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y, after: y, r"Return \(outputs, carried arrays by name\)"),
        (lambda y, after: (y[:, -1], after), r"returned outputs \(2, 3\) for inputs \(2, 4, 3\)"),
        (lambda y, after: (y, {}), r"carried arrays \{\}, expected \{'last': \(2, 3\)\}"),
        (lambda y, after: (y, {"last": y}), r"\{'last': \(2, 4, 3\)\}, expected \{'last': \(2, 3\)\}"),
    ],
)
def test_what_advance_returns_is_checked(change, message):
    class Wrong(Average):
        class Config(Average.Config):
            pass

        def advance(self, before, documents, x):
            return change(*super().advance(before, documents, x))

    with pytest.raises(ax.ConfigError, match=message):
        ax.invoke(
            Wrong.Config(input_dim=3).build(rngs=ax.Rngs(0)), jnp.ones((2, 4, 3)), TokenInfo.of(jnp.zeros((2, 4)))
        )


def test_a_recurrence_without_carried_arrays_is_refused():
    class Without(Average):
        class Config(Average.Config):
            pass

        def __init__(self, cfg, *, rngs):
            pass

    with pytest.raises(ax.ConfigError, match=r"Without carries no array\. Call self\.carry"):
        ax.invoke(
            Without.Config(input_dim=3).build(rngs=ax.Rngs(0)), jnp.ones((2, 4, 3)), TokenInfo.of(jnp.zeros((2, 4)))
        )
