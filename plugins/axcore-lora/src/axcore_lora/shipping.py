"""The adapters of a model apart from it: what one ships, and putting it back."""

from __future__ import annotations

from typing import Any

from axcore.config import AxcoreError
from axcore.module import Tree

SLOT = "adapter"
NAMES = ("a", "b", "magnitude")
"""The parameters that an adapter may have; the first two it must."""


def adapters(params: Tree) -> Tree:
    """Of a model's parameters those of LoRA and DoRA adapters, in the same nesting. Arrays are not copied.

    Any tree in the form of the parameters will do, such as shapes or `axcore.functional(model)[0].axes`.
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
    """A model's parameters with these adapters, in place of those that it has or beside weights that have none yet.

    Args:
        params: of the model; left as they are.
        adapters: as `adapters` gave them.

    Raises:
        AxcoreError: an adapter for a weight that is not there, or of other shapes than the model's.
    """
    return _load(params, adapters, ())


def _load(params: Tree, new: Tree, path: tuple[Any, ...]) -> Tree:
    whole = dict(params)
    for name, part in new.items():
        here = (*path, name)
        if name == SLOT and {"a", "b"} <= part.keys():
            part = {key: part[key] for key in NAMES if key in part}
            _check(params, part, here)
            whole[name] = part
        elif isinstance(params.get(name), dict):
            whole[name] = _load(params[name], part, here)
        else:
            raise AxcoreError(f"an adapter is below {dotted(here)}, and the model has nothing there: is it of another?")
    return whole


def _check(linear: Tree, adapter: Tree, path: tuple[Any, ...]) -> None:
    if "weight" not in linear:
        raise AxcoreError(f"{dotted(path)} is an adapter, and the model has no weight beside it: is it of another?")
    if not isinstance(linear["weight"], dict):  # what is stored as codes may have other shapes
        *stack, input_dim, output_dim = linear["weight"].shape
        rank = adapter["a"].shape[-1]
        expected = {"a": (*stack, input_dim, rank), "b": (*stack, rank, output_dim), "magnitude": (*stack, output_dim)}
        check_shapes(adapter, {name: expected[name] for name in adapter}, path)
    if SLOT in linear:
        check_shapes(adapter, {name: leaf.shape for name, leaf in linear[SLOT].items()}, path)


def check_shapes(found: Tree, expected: dict[str, tuple[int, ...]], path: tuple[Any, ...]) -> None:
    """
    Raises:
        AxcoreError: arrays are missing, too many, or of another shape than expected; names them by their path.
    """
    shapes = {name: leaf.shape for name, leaf in found.items()}
    if shapes != expected:
        raise AxcoreError(f"{dotted(path)} has the arrays {_shown(shapes)}, and the model expects {_shown(expected)}")


def dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _shown(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items())) or "none"
