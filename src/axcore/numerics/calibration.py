"""Measures statistics of activations, such as static scales, on a few batches."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Int

from axcore.config import AxcoreError, Config, ConfigError
from axcore.module import Tree, abstract, functional
from axcore.numerics.base import Numerics


class CalibrationState(nnx.Variable[jax.Array]):
    """A float32 statistic of the inputs of a layer's products, which `calibrated` measures. NaN until then, so that
    products are NaN. Training and `axcore.infer` raise instead, see `require_calibrated`.

    The constructor of a `Numerics` creates it, as in `CalibrationState(jnp.full((), jnp.nan), axes=())`.
    `Numerics.observe` updates it.
    """


def calibrated(cfg: Config, params: Tree, state: Tree, batches: Iterable[Int[Array, "batch seq"]]) -> Tree:
    """Measures all `CalibrationState` of a model on batches of token ids.

    Layers whose numerics have a `CalibrationState` compute in floats meanwhile. State of a layer that computes no
    product, such as an embedding that only looks up rows, becomes 0.

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
    measured = flatten_dict(nnx.to_pure_dict(nnx.state(model, CalibrationState)))
    if not measured:
        raise ConfigError(
            "no numerics in the config are calibrated; add numerics with static scales, such as "
            "axcore.use('int8', activation_scales='static'), or leave out the calibration"
        )
    given, before = flatten_dict(state), {}
    for path, form in flatten_dict(forms).items():
        if path not in measured and path not in given:
            raise AxcoreError(f"the state has no entry at {'.'.join(map(str, path))}; pass the state of the model")
        before[path] = jnp.full(form.shape, -jnp.inf, form.dtype) if path in measured else given[path]
    observing = functional(model)[0]
    run = jax.jit(lambda params, state, ids: observing(params, state, ids)[1])
    found = first = unflatten_dict(before)
    for ids in batches:
        found = run(params, found, ids)
    if found is first:
        raise ConfigError("batches is empty; pass at least one batch of token ids")
    seen = flatten_dict(found)
    merged: Tree = unflatten_dict(
        before | {path: jnp.where(seen[path] == -jnp.inf, 0.0, seen[path]) for path in measured}
    )
    return merged


def require_calibrated(model: nnx.Module, path: str = "") -> None:
    """Raises if a `CalibrationState` of a model has not been measured.

    Args:
        model: a model with arrays, or with shapes instead, which count as not measured. Traced arrays are not checked.
        path: config path of the model, for the message.

    Raises:
        ConfigError: names the layers.
    """
    found = [
        (".".join(filter(None, (path, *map(str, below)))), name)
        for below, module in nnx.iter_modules(model)
        if isinstance(module, Numerics)
        for name, state in vars(module).items()
        if isinstance(state, CalibrationState) and _is_unmeasured(state.get_value())
    ]
    if found:
        (first, name), others = found[0], len(found) - 1
        raise ConfigError(
            f"{first}: {name} is not measured{f' (nor that of {others} other layers)' if others else ''}. Measure "
            f"static scales with axcore.numerics.calibrated, or with `axcore quantize MODEL FOLDER --use NAME --text "
            f"FILE`. To train, use scales that each call computes, as int8 does with activation_scales='dynamic'"
        )


def _is_unmeasured(value: jax.Array | jax.ShapeDtypeStruct) -> bool:
    if isinstance(value, jax.core.Tracer):
        return False
    return isinstance(value, jax.ShapeDtypeStruct) or bool(jnp.isnan(value).any())
