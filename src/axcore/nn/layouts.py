"""The dtype and the memory layout of weights for decoding."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Format, Layout

from axcore.config import Config
from axcore.config.tree import NESTING, parts
from axcore.module import Tree
from axcore.nn.linear import Linear
from axcore.nn.weighted import Weighted


def in_compute_dtype(model: nnx.Module, params: Tree) -> Tree:
    """The parameters with the weights of `Weighted` layers in the compute dtype, if it is smaller.

    Products convert their weights to the compute dtype, so their results do not change. Layers with numerics or an
    adapter, which read the weight itself, keep its dtype.

    Args:
        model: the model with these parameters.
        params: its parameters, or their shapes.
    """
    for path, layer in nnx.iter_modules(model):
        if not isinstance(layer, Weighted) or layer.numerics is not None or getattr(layer, "adapter", None) is not None:
            continue
        params = _smaller(params, (*path, "weight"), jnp.dtype(layer.dtypes.compute or jnp.float32))
    return params


def _smaller(params: Any, path: tuple[Any, ...], dtype: Any) -> Any:  # Any: nodes and keys of a tree, and a dtype
    """The parameters with this dtype of one of them, if it is smaller."""
    if path:
        return {**params, path[0]: _smaller(params[path[0]], path[1:], dtype)}
    if params.dtype.itemsize <= dtype.itemsize:
        return params
    return params.update(dtype=dtype) if isinstance(params, jax.ShapeDtypeStruct) else params.astype(dtype)


def column_major(cfg: Config, params: Tree) -> Tree:
    """The parameters with the matrices of linear maps in column-major order in memory, wherever the implementation of
    the product reads columns (`Matmul.reads_columns`). Shapes and values do not change.

    Args:
        cfg: config of the model.
        params: its parameters, which are copied where the order changes. They may be shapes; the order of those
            without a sharding does not change.
    """
    new: dict[Any, Any] = dict(params)
    if isinstance(cfg, Linear.Config) and cfg.matmul.reads_columns and "weight" in params:
        return new | {"weight": jax.tree.map(_column_major, params["weight"])}
    for name, part in parts(cfg):
        key: Any = int(name) if name.isdigit() else name  # elements of lists have integer keys
        if isinstance(part, NESTING) and isinstance(below := params.get(key), dict):
            new[key] = column_major(cast(Config, part), below)
    return new


def _column_major(leaf: Any) -> Any:  # Any: an array, or its shape
    if leaf.ndim < 2 or 1 in leaf.shape[-2:] or leaf.sharding is None:
        return leaf
    *lead, rows, columns = range(leaf.ndim)
    order = Format(Layout((*lead, columns, rows)), leaf.sharding)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=order)
    return jax.device_put(leaf, order)
