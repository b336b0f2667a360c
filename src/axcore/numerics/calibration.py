"""Measures statistics of activations, such as static scales, on a few batches."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from axcore.config import AxcoreError, Config, ConfigError
from axcore.module import Tree, abstract, functional
from axcore.numerics.base import Numerics


class CalibrationState(nnx.Variable[jax.Array]):
    """A float32 statistic of the inputs of a layer's products, which `calibrated` measures. NaN until then.

    The constructor of a `Numerics` creates it, as in `CalibrationState(jnp.full((), jnp.nan), axes=())`.
    `Numerics.observe` updates it.
    """


def calibrated(cfg: Config, params: Tree, state: Tree, batches: Iterable[Int[Array, "batch seq"]]) -> Tree:
    """Measures all `CalibrationState` of a model on batches of token ids.

    Layers whose numerics have a `CalibrationState` compute in floats meanwhile. State of a layer whose weight is
    multiplied by nothing, such as an embedding that only looks up rows, stays NaN.

    Args:
        cfg: config of a float model that `use` added the numerics to.
        params: parameters of the model; layers may be stacked. Stored weights are decoded.
        state: the model's other state, with or without the calibration state.
        batches: at least one. For a few hundred sequences, pass them in several batches.

    Returns:
        The state with the measured statistics.

    Raises:
        ConfigError: no numerics in the config have a `CalibrationState`, or there are no batches.
        AxcoreError: `state` lacks other state of the model.
    """
    fn, shapes, forms = abstract(cfg)
    model = fn.bind(shapes, forms)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Numerics):
            module.calibrating = any(isinstance(each, CalibrationState) for each in vars(module).values())
    measured: Tree = nnx.to_pure_dict(nnx.state(model, CalibrationState))
    if not measured:
        raise ConfigError(
            "no numerics in the config are calibrated; add numerics with static scales, such as "
            "axcore.use('int8', activation_scales='static'), or leave out the calibration"
        )
    observing = functional(model)[0]
    run = jax.jit(lambda params, state, ids: observing(params, state, ids)[1])
    before = _filled(forms, state, measured, ())
    found = before
    for ids in batches:
        found = run(params, found, ids)
    if found is before:
        raise ConfigError("batches is empty; pass at least one batch of token ids")
    return _merged(before, found, measured)


def calibration_paths(cfg: Config) -> list[str]:
    """The paths of all `CalibrationState` of a model, such as `decoder.layers.ffn.up.numerics.input_amax`."""
    fn, shapes, forms = abstract(cfg)
    found = nnx.to_pure_dict(nnx.state(fn.bind(shapes, forms), CalibrationState))
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(found)]


def _filled(forms: Tree, given: Tree, measured: Tree, path: tuple[object, ...]) -> Tree:
    """`given` with -inf for the state that is measured, and its shapes from `forms`."""
    filled: Tree = {}
    for name, form in forms.items():
        here = (*path, name)
        if isinstance(form, dict):
            filled[name] = _filled(form, given.get(name, {}), measured.get(name, {}), here)
        elif name in measured:
            filled[name] = jnp.full(form.shape, -jnp.inf, form.dtype)
        elif name in given:
            filled[name] = given[name]
        else:
            raise AxcoreError(f"the state has no entry at {'.'.join(map(str, here))}; pass the state of the model")
    return filled


def _merged(state: Tree, found: Tree, measured: Tree) -> Tree:
    """`state` with the statistics in `found`, and NaN for those that no layer updated."""
    merged: Tree = dict(state)
    for name, below in measured.items():
        if isinstance(below, dict):
            merged[name] = _merged(state[name], found[name], below)
        else:
            value: Float[Array, ...] = found[name]
            merged[name] = jnp.where(value == -jnp.inf, jnp.nan, value)
    return merged
