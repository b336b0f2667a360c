"""Editing most layers of a stack and leaving every n-th as it was."""

from __future__ import annotations

from collections.abc import Callable

import axcore as ax
from axcore.config import get, walk
from axcore.nn import Repeat, Sequence


def edit_most(
    cfg: ax.Config, where: ax.Where, edit: Callable[[str, ax.Config], ax.Config], keep_every: int
) -> ax.Config:
    """Replaces selected nodes by `edit(path, node)`; of each `keep_every` layers (2 or more) the last keeps its own.

    A `Repeat` that holds selected nodes becomes one of groups of `keep_every` layers, spelled out. Nodes outside of any
    `Repeat` are counted in the order in which they stand.

    Raises:
        ConfigError: nothing is selected, or the layers of a `Repeat` do not divide into such groups.
    """
    selected = ax.select(cfg, where).paths
    stacks = [path for path, node in walk(cfg) if isinstance(node, Repeat.Config)]
    stack_of = {
        path: max((each for each in stacks if _repeats(each, path)), key=len, default=None) for path in selected
    }
    alone = [path for path in selected if stack_of[path] is None]
    edited = set(selected) - set(alone[keep_every - 1 :: keep_every])
    mixed = ax.select(cfg, lambda path, _: path in edited).map(edit)

    def group(path: str, stack: ax.Config) -> ax.Config:
        assert isinstance(stack, Repeat.Config)
        if stack.num_layers is ax.REQUIRED or stack.num_layers % keep_every:
            raise ax.ConfigError(
                f"num_layers={stack.num_layers!r} is not a multiple of {keep_every}, the size of a group"
            )
        layers = (stack.layers,) * (keep_every - 1) + (get(cfg, path).layers,)
        return stack.set(num_layers=stack.num_layers // keep_every, layers=Sequence.Config(layers=layers))

    grouped = set(stack_of.values()) - {None}
    return ax.select(mixed, lambda path, _: path in grouped).map(group) if grouped else mixed


def _repeats(stack: str, path: str) -> bool:
    """Whether the `Repeat` at the path `stack` repeats the node at `path`."""
    return f"{path}.".startswith(f"{stack}.layers.".removeprefix("."))
