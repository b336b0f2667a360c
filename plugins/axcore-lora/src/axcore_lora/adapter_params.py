"""Extracts the adapters of a model, and loads them into a model."""

from __future__ import annotations

from typing import Any

from axcore.config import AxcoreError
from axcore.module import Tree

SLOT = "adapter"
NAMES = ("a", "b", "magnitude")
"""The parameters of an adapter. The first two are required."""


def adapters(params: Tree) -> Tree:
    """The parameters of LoRA and DoRA adapters among a model's parameters, in the same nesting. Does not copy arrays.

    Accepts any tree with the structure of the parameters, such as shapes or `axcore.functional(model)[0].axes`.
    """
    found: Tree = {}
    for name, part in params.items():
        if not isinstance(part, dict):
            continue
        if name == SLOT and {"a", "b"} <= part.keys() <= set(NAMES):
            found[name] = dict(part)
        elif inner := adapters(part):
            found[name] = inner
    return found


def load(params: Tree, adapters: Tree) -> Tree:
    """Adds adapters to a model's parameters. Existing adapters are replaced.

    Args:
        params: the parameters of the model; not modified.
        adapters: as returned by `adapters`.

    Raises:
        AxcoreError: an adapter has no weight in the model, or its shapes do not fit.
    """
    return _load(params, adapters, (), params)


def _load(params: Tree, new: Tree, path: tuple[Any, ...], linear: Tree) -> Tree:
    """Args:
    linear: the parameters of the layer that has the adapters: `params`, or above it if one adapter wraps another.
    """
    whole = dict(params)
    for name, part in new.items():
        here = (*path, name)
        if name == SLOT and {"a", "b"} <= part.keys():
            part = {key: part[key] for key in NAMES if key in part}
            _check(linear, params.get(SLOT), part, here)
            whole[name] = part
        elif isinstance(params.get(name), dict):
            below = params[name]
            whole[name] = _load(below, part, here, linear if name == SLOT else below)
        else:
            raise AxcoreError(f"the given adapters include one below {dotted(here)}, which the model lacks")
    return whole


def _check(linear: Tree, held: Tree | None, adapter: Tree, path: tuple[Any, ...]) -> None:
    if "weight" not in linear:
        raise AxcoreError(f"{dotted(path)} is an adapter of a weight that the model lacks")
    if not isinstance(linear["weight"], dict):  # quantized weights may have other shapes
        *stack, input_dim, output_dim = linear["weight"].shape
        rank = adapter["a"].shape[-1]
        expected = {"a": (*stack, input_dim, rank), "b": (*stack, rank, output_dim), "magnitude": (*stack, output_dim)}
        check_shapes(adapter, {name: expected[name] for name in adapter}, path)
    if held is not None:
        check_shapes(adapter, {name: leaf.shape for name, leaf in held.items()}, path)


def check_shapes(found: Tree, expected: dict[str, tuple[int, ...]], path: tuple[Any, ...]) -> None:
    """Raises unless `found` has exactly the expected arrays.

    Raises:
        AxcoreError: arrays are missing, unexpected or of another shape.
    """
    shapes = {name: leaf.shape for name, leaf in found.items()}
    if shapes != expected:
        raise AxcoreError(f"{dotted(path)} has the arrays {_shown(shapes)}, but the model expects {_shown(expected)}")


def dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _shown(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items())) or "none"
