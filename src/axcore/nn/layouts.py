"""The memory layout of weights for decoding."""

from __future__ import annotations

from typing import Any, cast

import jax
from jax.experimental.layout import Format, Layout

from axcore.config import Config
from axcore.config.tree import NESTING, parts
from axcore.module import Tree
from axcore.nn.linear import Linear


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
