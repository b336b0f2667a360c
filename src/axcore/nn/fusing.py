"""Joins the weights of products of the same input, so that decoding computes them in one product."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from axcore.config import Config
from axcore.config.tree import NESTING, parts, rebuild
from axcore.module import Tree
from axcore.nn.linear import Linear


@dataclasses.dataclass(frozen=True)
class Fusion:
    """How a layer computes several of its linear maps, which are equal and have the same input, in one product.

    The config of a layer returns it from a method `fusion() -> Fusion | None`, as that of `Attention` does.

    Attributes:
        config: the config of the fused layer.
        names: the fields of the linear maps.
        fused: the field of the linear map that replaces them.
        groups: the number of equal groups of columns in which the fused columns are ordered. Each group has a group of
            columns of every map, in the order of `names`.
    """

    config: Config
    names: tuple[str, ...]
    fused: str
    groups: int

    def joined(self, arrays: Sequence[Shaped[Array, "*shape output_dim"]]) -> Shaped[Array, "*shape fused_dim"]:
        """The fused array: weights, codes, scales or biases of all maps, joined along the outputs."""
        shape = arrays[0].shape[:-1]
        groups = [each.reshape(*shape, self.groups, -1) for each in arrays]
        return jnp.concatenate(groups, axis=-1).reshape(*shape, -1)


def fused[C: Config](cfg: C, params: Tree, state: Tree) -> tuple[C, Tree]:
    """The model with the weights of products of the same input joined, wherever a layer offers a `Fusion`.

    Linear maps stay as they are if they have an adapter, numerics that are not stored, stored arrays that are not
    divided by outputs (such as one scale for the whole weight), or state.

    Args:
        cfg: config of the model.
        params: its parameters, which are copied where they are joined. They may be shapes.
        state: its other state, which does not change.

    Returns:
        The config and the parameters of the fused model.
    """
    changes: dict[str, Any] = {}
    new: dict[Any, Any] = dict(params)
    for name, part in parts(cfg):
        key: Any = int(name) if name.isdigit() else name  # elements of lists have integer keys
        if isinstance(part, NESTING) and isinstance(below := params.get(key), dict):
            made, new[key] = fused(cast(Config, part), below, state.get(key, {}))
            if made is not part:
                changes[name] = made
    cfg = rebuild(cfg, changes) if changes else cfg
    offer = getattr(cfg, "fusion", None)
    fusion: Fusion | None = None if offer is None else offer()
    if fusion is None or not _can_join(cfg, fusion, new, state):
        return cfg, new
    children = [new.pop(name) for name in fusion.names]

    def joined(*arrays: Any) -> Any:  # Any: an array, or its shape
        if isinstance(arrays[0], jax.ShapeDtypeStruct):
            return jax.eval_shape(lambda *each: fusion.joined(each), *arrays)
        return fusion.joined(arrays)

    new[fusion.fused] = jax.tree.map(joined, *children)
    return cast(C, fusion.config), new


def _can_join(cfg: Config, fusion: Fusion, params: Tree, state: Tree) -> bool:
    linear = getattr(cfg, fusion.names[0])
    if type(linear) is not Linear.Config or linear.adapter is not None:
        return False
    if linear.numerics is not None and not linear.numerics.stored:
        return False
    if any(name in state or name not in params for name in fusion.names):
        return False
    for name in fusion.names:
        widths = {leaf.shape[-1] for leaf in jax.tree.leaves(params[name])}
        if len(widths) != 1 or widths.pop() % fusion.groups:
            return False
    return True
