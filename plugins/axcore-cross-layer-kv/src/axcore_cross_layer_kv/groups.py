"""Groups the layers of a model so that each group computes keys and values once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import axcore as ax
from axcore.config import walk
from axcore.nn import Attention, Stack
from axcore_cross_layer_kv.caches import BorrowKV, ShareKV, borrowing, sharing

Places = tuple[str, ...]
"""The paths of attentions, relative to the layer that contains them."""

Role = Callable[[Any, str], Attention.Config]
"""`sharing` or `borrowing`."""


def use_cross_layer_kv(
    cfg: ax.Config, every: int = 2, where: ax.Where = Attention, allow_shorter: bool = False
) -> ax.Config:
    """Each layer attends with the keys and values of the first layer of its group (Brandon et al. 2024, arXiv
    2405.12981).

    In each stack, every `every` layers with attention form a group; other layers may be between them. A `Repeat` then
    repeats groups: `layers.attention` becomes `layers.layers.0.attention`, which has keys and values,
    `layers.layers.1.attention`, which does not, and so on.

    A stack with only one attention layer counts as part of the enclosing layer.

    A layer may contain several attentions. Each is paired with the attention at the same path in the group's first
    layer.

    Args:
        every: layers per group. The number of keys, values and KV caches shrinks by this factor.
        where: which attentions.
        allow_shorter: allow a smaller last group if the number of layers is not a multiple of `every`. A `Repeat` then
            becomes a `Sequence` of the full groups and the layers of the last one.

    Raises:
        ConfigError: the layers cannot be divided into such groups, or an attention is already in a group.
    """
    if every < 2:
        raise ax.ConfigError(f"every must be at least 2, not {every}")
    chosen = {path for path, node in ax.select(cfg, where) if _can_share(path, node)}

    def alone(layer: ax.Config, path: str) -> Places:
        """The selected attentions of a layer that are not in a group yet. Until grouped, they keep their paths."""
        return tuple(place for place, node in walk(layer) if _join(path, place) in chosen and not _in_group(node))

    def group(path: str, node: ax.Config) -> ax.Config:
        if not isinstance(node, Stack.Config):
            return node
        layers = [place.config for place in node.places()]
        found = [alone(place.config, _join(path, place.config_path)) for place in node.places()]
        holding = {index: places for index, places in enumerate(found) if places}
        if len(holding) < 2:
            return node
        return node.restack(_grouped(layers, every, holding, allow_shorter))

    grouped = ax.select(cfg, "**").map(group)
    if left := alone(grouped, ""):
        paths = ", ".join(path or "the root" for path in left)
        raise ax.ConfigError(
            f"{paths}: not in a stack with another layer to share with. Select the attentions to group with where=."
        )
    return grouped


def _can_share(path: str, node: ax.Config) -> bool:
    if not isinstance(node, Attention.Config):
        raise ax.ConfigError(f"at {path or 'the root'}: only attentions can share keys and values, not {node!r}")
    if node.qkv is not None:
        raise ax.ConfigError(
            f"at {path or 'the root'}: qkv computes keys in every layer. Set query, key and value separately instead."
        )
    if _in_group(node):
        raise ax.ConfigError(f"at {path or 'the root'}: already shares keys and values with other layers")
    return True


def _in_group(node: Any) -> bool:
    return isinstance(node, Attention.Config) and isinstance(node.cache, ShareKV.Config | BorrowKV.Config)


def _grouped(
    layers: list[Any], every: int, holding: dict[int, Places], allow_shorter: bool
) -> tuple[ax.Layer.Config, ...]:
    """The layers in groups of `every`. `holding` maps layers with attention to the places of their attentions."""
    count = len(holding)
    if count % every and not allow_shorter:
        raise _indivisible(f"{count} layers with attention", count, every)
    made = list(layers)
    for number, (index, places) in enumerate(holding.items()):
        if number % every == 0:
            first = index
        elif places != holding[first]:
            raise ax.ConfigError(
                f"layers {first} and {index} cannot share keys, since their attentions have different paths: "
                f"{', '.join(holding[first])} and {', '.join(places)}"
            )
        # If every layer is in a group, the names omit the group's number. Groups are then equal and can be scanned.
        name = 0 if count == len(layers) else first
        made[index] = _take_part(layers[index], places, sharing if index == first else borrowing, name)
    return tuple(made)


def _take_part[C: ax.Config](layer: C, places: Places, role: Role, first: int) -> C:
    """The layer with `role` applied to its attentions. Shared values are named after `first` and the place."""
    return ax.select(layer, lambda place, _: place in places).map(
        lambda place, attention: role(attention, _join(str(first), place))
    )


def _indivisible(what: str, count: int, every: int) -> ax.ConfigError:
    below = count - count % every
    fitting = f"{below} or {below + every}" if below else f"{every}"
    divisors = [each for each in range(2, count + 1) if count % each == 0]
    nearest = min(divisors, key=lambda each: abs(each - every), default=None)
    other = f", every={nearest}" if nearest else ""
    return ax.ConfigError(
        f"{what} cannot be divided into groups of every={every}. Use {fitting} layers{other}, or allow_shorter=True "
        f"for a shorter last group."
    )


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)
