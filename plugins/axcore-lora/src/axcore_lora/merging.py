"""Merges adapters into the weights of their layers, and unmerges them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import axcore as ax
from axcore.config import AxcoreError, get, has_field, walk
from axcore.module import Tree, abstract
from axcore_lora.adapter_params import SLOT, check_shapes, dotted
from axcore_lora.attach import unfreeze
from axcore_lora.layer import LoRA, magnitude_scale, scale

MAGNITUDE_SCALE = "magnitude_scale"
"""Key in `Merged.kept`, next to the parameters of a DoRA adapter: the factor of each column of W + sAB."""

Path = tuple[Any, ...]


class Merged(NamedTuple):
    """A model without adapters that computes the same function as the adapted model.

    Attributes:
        cfg: the config with empty adapter slots.
        params: the parameters of the merged model.
        kept: the values that `unmerge` requires: the adapters, and for DoRA also the factor of each column.
    """

    cfg: ax.Config
    params: Tree
    kept: Tree


def merge(cfg: ax.Config, params: Tree) -> Merged:
    """Merges every LoRA and DoRA adapter into its weight: `W + sAB`, for DoRA with each column rescaled.

    The merged weight is computed in float32 and rounded to the dtype of the weight. Low-precision numerics then round
    the merged weight instead of the base weight. The arguments are not modified.

    Args:
        cfg: the config of a model or of a trainer. The rates that `freeze=True` set are removed from a trainer's
            learner.
        params: the parameters of the model that `cfg` or the trainer's `model` builds. Stacked layers stay stacked.

    Raises:
        ConfigError: the config has no adapter, or one that another adapter wraps.
        AxcoreError: the parameters do not belong to this config.
    """
    kept: Tree = {}
    for path, (adapter, form) in adapters_of(cfg).items():
        linear, weight = _linear(params, path)
        mine = linear.get(SLOT, {})
        check_shapes(mine, {name: leaf.shape for name, leaf in form.items()}, (*path, SLOT))
        merged, rescale = _fold(weight, scale(adapter), **mine)
        rest = {name: part for name, part in linear.items() if name != SLOT}
        params = _put(params, path, {**rest, "weight": merged})
        kept = _put(kept, (*path, SLOT), mine if rescale is None else {**mine, MAGNITUDE_SCALE: rescale})
    emptied = ax.select(cfg, lambda _, node: _holds_adapter(node)).set(adapter=None)
    return Merged(unfreeze(emptied), params, kept)


def unmerge(cfg: ax.Config, params: Tree, kept: Tree) -> Tree:
    """Inverts `merge`, up to the rounding of the weights' dtype.

    If DoRA multiplied a column by exactly 0, the column cannot be recovered: its values are NaN or infinite.

    Args:
        cfg: the config that was passed to `merge`.
        params: `Merged.params`, possibly after further training.
        kept: `Merged.kept`.

    Raises:
        ConfigError: the config has no adapter.
        AxcoreError: `params` or `kept` do not belong to this config.
    """
    for path, (adapter, form) in adapters_of(cfg).items():
        linear, weight = _linear(params, path)
        if SLOT in linear:
            raise AxcoreError(
                f"{dotted((*path, SLOT))}: the parameters still have this adapter, so they are not merged"
            )
        mine = dict(_at(kept, (*path, SLOT)) or {})
        rescale = mine.pop(MAGNITUDE_SCALE, None)
        check_shapes(mine, {name: leaf.shape for name, leaf in form.items()}, (*path, SLOT))
        if "magnitude" in mine and rescale is None:
            raise AxcoreError(
                f"{dotted((*path, SLOT))} lacks {MAGNITUDE_SCALE!r}, which unmerging DoRA requires. Pass the `kept` "
                f"that merge returned."
            )
        base = _unfold(weight, scale(adapter), mine["a"], mine["b"], rescale)
        params = _put(params, path, {**linear, "weight": base, SLOT: mine})
    return params


def adapters_of(cfg: ax.Config) -> dict[Path, tuple[LoRA.Config, Tree]]:
    """The adapter's config and the shapes of its parameters, by the path of the linear layer in the parameters.

    Builds the model with abstract shapes, since a layer's paths in the config and in the parameters may differ.
    """
    model, where = (get(cfg, "model"), "model") if has_field(cfg, "model") else (cfg, "")
    if not any(_holds_adapter(node) for _, node in walk(model)):
        raise ax.ConfigError("the config has no LoRA or DoRA adapter. Pass a config with use('lora').")
    fn, shapes, state = abstract(model, where)
    modules = nnx.iter_modules(fn.bind(shapes, state))
    found = {path[:-1]: (module.config, _at(shapes, path)) for path, module in modules if isinstance(module, LoRA)}
    if wrapped := next((path for path in found if path[-1] == SLOT), None):
        raise ax.ConfigError(
            f"{dotted((*wrapped, SLOT))} is inside another adapter, which may change its result, so it cannot be "
            f"merged into the weight. Keep the adapters, or remove the outer one."
        )
    return found


def _holds_adapter(node: ax.Config) -> bool:
    return has_field(node, SLOT) and isinstance(getattr(node, SLOT), LoRA.Config)


def _linear(params: Tree, path: Path) -> tuple[Tree, jax.Array]:
    linear = _at(params, path)
    if not isinstance(linear, dict) or "weight" not in linear:
        raise AxcoreError(f"the parameters have no {dotted((*path, 'weight'))}, so they do not belong to this config")
    if isinstance(linear["weight"], dict):
        raise AxcoreError(
            f"{dotted((*path, 'weight'))} is stored as {', '.join(linear['weight'])}, but merging requires a float "
            f"weight. Merge first and store the merged model with axcore.numerics.stored."
        )
    return linear, linear["weight"]


@jax.jit
def _fold(weight: Any, factor: Any, a: Any, b: Any, magnitude: Any = None) -> tuple[jax.Array, jax.Array | None]:
    """The merged weight of a layer and its adapter, and the factor of each column in DoRA."""
    merged, rescale = weight.astype(jnp.float32) + _change(factor, a, b), None
    if magnitude is not None:
        rescale = magnitude_scale(weight, a, b, magnitude, factor)
        merged *= rescale[..., None, :]
    return merged.astype(weight.dtype), rescale


@jax.jit
def _unfold(weight: Any, factor: Any, a: Any, b: Any, rescale: Any) -> jax.Array:
    """The inverse of `_fold`. `rescale` is None for LoRA."""
    whole = weight.astype(jnp.float32)
    if rescale is not None:
        whole /= rescale[..., None, :]
    return (whole - _change(factor, a, b)).astype(weight.dtype)


def _change(factor: Any, a: Any, b: Any) -> jax.Array:
    """sAB, float32 [..., input_dim, output_dim]."""
    return factor * jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def _at(tree: Any, path: Path) -> Any:
    """The value at a path, or None."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _put(tree: Tree, path: Path, new: Tree) -> Tree:
    """A copy of nested dicts with `new` at a path, which need not exist."""
    if not path:
        return new
    return {**tree, path[0]: _put(tree.get(path[0], {}), path[1:], new)}
