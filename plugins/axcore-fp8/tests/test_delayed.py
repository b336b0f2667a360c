"""The state of delayed scaling: histories, scales, overflow, and steps on several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore.module import invoke, overwrite_with_gradient, to_fm32
from axcore.testing.devices import on_devices

from .parallel_steps import MESHES, both
from .support import linear

LENGTH = 3


def step(fn, params, state, x, g):
    """The state after a step with this input, and this gradient of the result."""

    def after(state):
        gradient = jax.grad(lambda state: (fn(params, state, x)[0][0] * g).sum(), allow_int=True)
        return overwrite_with_gradient(gradient(to_fm32(state)), state)

    return jax.jit(after)(state)


def layer():
    return linear(16, 8, scaling="delayed", amax_history_len=LENGTH)


def numerics(state):
    return {name: np.asarray(value) for name, value in state["numerics"].items()}


def test_histories_hold_the_largest_values_of_the_last_steps():
    fn, params, state = layer()
    x, g = jnp.ones((4, 16)), jnp.ones((4, 8))
    for number in range(1, 5):
        state = step(fn, params, state, number * x, 0.5 * number * g)
    found = numerics(state)
    np.testing.assert_array_equal(found["input"], [4.0, 3.0, 2.0])
    np.testing.assert_array_equal(found["gradient"], [2.0, 1.5, 1.0])
    np.testing.assert_allclose(found["weight"], np.full(3, np.abs(params["weight"]).max()))


def test_scales_come_from_earlier_steps():
    """A number above the history saturates at the largest code, and is counted."""
    fn, params, state = layer()
    state = step(fn, params, state, jnp.ones((4, 16)), jnp.ones((4, 8)))
    large = jnp.zeros((1, 16)).at[0, 0].set(5.0)
    y, reports = invoke(fn.bind(params, state), large)
    scale = 2.0 ** np.ceil(np.log2(1 / 448))
    np.testing.assert_allclose(y[0], 448 * scale * np.asarray(params["weight"][0]), rtol=0.07, atol=1e-3)
    assert float(reports.summaries["numerics.overflow"].value) == 1
    state = step(fn, params, state, large, jnp.ones((1, 8)))
    y, reports = invoke(fn.bind(params, state), large)
    np.testing.assert_allclose(y[0], 5 * np.asarray(params["weight"][0]), rtol=0.07, atol=1e-3)
    assert float(reports.summaries["numerics.overflow"].value) == 0


@pytest.mark.parametrize(("factor", "overflows"), [(1.0, 0.0), (1e6, 1.0), (np.inf, 1.0), (np.nan, 1.0)])
def test_overflow_of_the_gradient_is_reported_one_step_later(factor, overflows):
    fn, params, state = layer()
    x, g = jnp.ones((4, 16)), jnp.ones((4, 8))
    state = step(fn, params, state, x, g)
    state = step(fn, params, state, x, factor * g)
    _, reports = invoke(fn.bind(params, state), x)
    assert float(reports.summaries["numerics.gradient_overflow"].value) == overflows
    assert np.isfinite(numerics(state)["gradient"]).all()  # a bad step does not set the scales of the next
    state = step(fn, params, state, x, g)
    assert numerics(state)["gradient_overflow"] == 0


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_gradients_that_are_not_finite_are_not_masked(bad):
    fn, params, state = layer()
    g = jnp.ones((4, 8)).at[1, 2].set(bad)
    of_params, of_x = jax.grad(lambda params, x: (fn(params, state, x)[0][0] * g).sum(), (0, 1))(
        params, jnp.ones((4, 16))
    )
    assert not np.isfinite(of_params["weight"][:, 2]).any() and not np.isfinite(of_x[1]).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_state_does_not_depend_on_layout_microbatches_or_remat(name):
    found, expected = on_devices(both, name)
    assert found.keys() == expected.keys()
    histories = [path for path in expected if path.rpartition(".")[2] in ("input", "weight", "gradient")]
    assert len(histories) == 3 * 7
    for path in histories:
        assert (expected[path][..., :2] > 0).all() and not expected[path][..., 2].any(), path
        np.testing.assert_allclose(found[path], expected[path], rtol=1e-3, err_msg=path)
