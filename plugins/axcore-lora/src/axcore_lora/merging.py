"""Folding adapters into the weights that they correct, and taking them out again."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import axcore as ax
from axcore.config import AxcoreError, get, has_field, walk
from axcore.module import Tree, abstract
from axcore_lora.attach import thaw
from axcore_lora.layer import LoRA, lengthening, scale
from axcore_lora.shipping import SLOT, check_shapes, dotted

LENGTH = "length"
"""In `Merged.kept`, beside the parameters of a DoRA adapter: what each column of W + sAB was multiplied by."""

Path = tuple[Any, ...]


class Merged(NamedTuple):
    """A model without adapters that computes what the adapted one did.

    Attributes:
        cfg: the config, its adapter slots empty.
        params: its parameters.
        kept: for `unmerge`: the adapters, and for DoRA also by how much it lengthened each column.
    """

    cfg: ax.Config
    params: Tree
    kept: Tree


def merge(cfg: ax.Config, params: Tree) -> Merged:
    """Folds every LoRA and DoRA adapter into its weight: `W + sAB`, and for DoRA each column times its length.

    It computes in float32 and rounds to the dtype of the weight. Numerics then round the merged weight as they rounded
    the base weight. The arguments are not modified.

    Args:
        cfg: of a model, or of a trainer (whose learner then loses the rates that `freeze=True` gave it).
        params: of the model that `cfg` builds, or that a trainer's `model` builds; stacked layers are as they are.

    Raises:
        ConfigError: the config has no such adapter.
        AxcoreError: the parameters are not those of this config.
    """
    kept: Tree = {}
    for path, (adapter, form) in _adapters(cfg).items():
        linear, weight = _linear(params, path)
        mine = linear.get(SLOT, {})
        check_shapes(mine, {name: leaf.shape for name, leaf in form.items()}, (*path, SLOT))
        merged, length = _fold(weight, scale(adapter), **mine)
        rest = {name: part for name, part in linear.items() if name != SLOT}
        params = _put(params, path, {**rest, "weight": merged})
        kept = _put(kept, (*path, SLOT), mine if length is None else {**mine, LENGTH: length})
    emptied = ax.select(cfg, lambda _, node: _holds_adapter(node)).set(adapter=None)
    return Merged(thaw(emptied), params, kept)


def unmerge(cfg: ax.Config, params: Tree, kept: Tree) -> Tree:
    """The parameters that `merge` was given, up to the rounding of the weights' dtype.

    A column that DoRA multiplied by exactly 0 cannot be had back, and is not finite.

    Args:
        cfg: the config that `merge` was given.
        params: `Merged.params`, or later values of them.
        kept: `Merged.kept`.

    Raises:
        ConfigError: the config has no adapter.
        AxcoreError: `params` or `kept` are not those of this config.
    """
    for path, (adapter, form) in _adapters(cfg).items():
        linear, weight = _linear(params, path)
        if SLOT in linear:
            raise AxcoreError(f"{dotted((*path, SLOT))}: the parameters have this adapter still; they are not merged")
        mine = dict(_at(kept, (*path, SLOT)) or {})
        length = mine.pop(LENGTH, None)
        check_shapes(mine, {name: leaf.shape for name, leaf in form.items()}, (*path, SLOT))
        if "magnitude" in mine and length is None:
            raise AxcoreError(
                f"{dotted((*path, SLOT))} lacks {LENGTH!r}, without which DoRA cannot be taken out of a weight; give "
                f"unmerge what merge returned as `kept`"
            )
        base = _unfold(weight, scale(adapter), mine["a"], mine["b"], length)
        params = _put(params, path, {**linear, "weight": base, SLOT: mine})
    return params


def _adapters(cfg: ax.Config) -> dict[Path, tuple[LoRA.Config, Tree]]:
    """Path of a linear layer among the parameters -> its adapter's config, and the form of the adapter's parameters.

    The model is built as shapes for it: where a layer stands in the config need not be where its parameters are.
    """
    model, where = (get(cfg, "model"), "model") if has_field(cfg, "model") else (cfg, "")
    if not any(_holds_adapter(node) for _, node in walk(model)):
        raise ax.ConfigError("the config has no LoRA or DoRA adapter; give the one that use('lora') made")
    fn, shapes, state = abstract(model, where)
    modules = nnx.iter_modules(fn.bind(shapes, state))
    return {path[:-1]: (module.config, _at(shapes, path)) for path, module in modules if isinstance(module, LoRA)}


def _holds_adapter(node: ax.Config) -> bool:
    return has_field(node, SLOT) and isinstance(getattr(node, SLOT), LoRA.Config)


def _linear(params: Tree, path: Path) -> tuple[Tree, jax.Array]:
    linear = _at(params, path)
    if not isinstance(linear, dict) or "weight" not in linear:
        raise AxcoreError(f"the parameters have no {dotted((*path, 'weight'))}; they are not those of this config")
    if isinstance(linear["weight"], dict):
        raise AxcoreError(
            f"{dotted((*path, 'weight'))} is stored as {', '.join(linear['weight'])}, and an adapter is merged into "
            f"floats; merge first and store the merged model with axcore.numerics.stored"
        )
    return linear, linear["weight"]


@jax.jit
def _fold(weight: Any, factor: Any, a: Any, b: Any, magnitude: Any = None) -> tuple[jax.Array, jax.Array | None]:
    """(the weight that a layer and its adapter stand for, what DoRA multiplied each column by)."""
    merged, length = weight.astype(jnp.float32) + _change(factor, a, b), None
    if magnitude is not None:
        length = lengthening(weight, a, b, magnitude, factor)
        merged *= length[..., None, :]
    return merged.astype(weight.dtype), length


@jax.jit
def _unfold(weight: Any, factor: Any, a: Any, b: Any, length: Any) -> jax.Array:
    """What `_fold` was given as weight; `length` is None for LoRA."""
    whole = weight.astype(jnp.float32)
    if length is not None:
        whole /= length[..., None, :]
    return (whole - _change(factor, a, b)).astype(weight.dtype)


def _change(factor: Any, a: Any, b: Any) -> jax.Array:
    """sAB, float32 [..., input_dim, output_dim]."""
    return factor * jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def _at(tree: Any, path: Path) -> Any:
    """What is at a path, or None."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _put(tree: Tree, path: Path, new: Tree) -> Tree:
    """A copy of nested dicts with `new` at a path, which need not exist."""
    if not path:
        return new
    return {**tree, path[0]: _put(tree.get(path[0], {}), path[1:], new)}
