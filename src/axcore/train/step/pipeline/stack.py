"""The stack of layers that a pipeline divides into stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from axcore.config import Config, ConfigError, walk
from axcore.config.tree import join
from axcore.module import Tree
from axcore.nn import Stack
from axcore.parallel import Layout, Remat

Names = tuple[Any, ...]  # Any: elements of lists have integer keys, whatever the type of `Tree`
"""The keys that lead to a subtree of arrays."""


@dataclasses.dataclass(frozen=True)
class PipelinedStack:
    """A stack of equal layers.

    Attributes:
        path: path of the stack.
        place: path of the layers' arrays, relative to the stack.
        count: number of layers.
        remat: the remat policy of a layer.
        unroll: number of layers in one step of a loop.
    """

    path: str
    place: str
    count: int
    remat: Remat | None
    unroll: int

    @property
    def names(self) -> Names:
        """The keys of the layers' arrays in the parameters and in other trees of the model."""
        return tuple(int(name) if name.isdigit() else name for name in join(self.path, self.place).split("."))

    def divided(self, tree: Tree) -> tuple[Tree, Tree]:
        """Divides a tree of the model into (the tree of the layers, the tree of the rest), without empty dicts."""
        return _divided(tree, self.names)

    def whole(self, layers: Tree, rest: Tree) -> Tree:
        """Combines both trees again: the inverse of `divided`."""
        return _whole(layers, rest, self.names) if layers else rest

    def axes(self, axes: Tree) -> Tree:
        """The logical axes of each array, where `layer` is kept only in this stack, the only one that is divided."""
        layers, rest = self.divided(axes)
        return self.whole(layers, _without_layer(rest))


def pipelined_stack(model: Config, layout: Layout, microbatches: int) -> PipelinedStack | None:
    """The stack that the stages of the layout divide: the one with the most layers; None without stages.

    Raises:
        ConfigError: no stack consists of equal layers, the layers cannot be divided into equal chunks, or there are
            fewer microbatches than stages.
    """
    if layout.pipeline is None:
        return None
    stacks = list(_stacks(model))
    if not stacks:
        raise ConfigError(
            f"mesh.shape has {layout.stages} pipeline stages, but the model has no stack of equal layers to "
            f"divide, such as a Repeat. Make the layers equal, or set the axis 'pipeline' to 1"
        )
    stack = max(stacks, key=lambda stack: stack.count)
    chunks = layout.pipeline.config.chunks
    total = layout.stages * chunks
    if stack.count % total:
        of = f"{layout.stages} stages" + (f" of {chunks} chunks each" if chunks > 1 else "")
        sizes = [size for size in range(1, stack.count + 1) if stack.count % (size * chunks) == 0]
        near = sorted(sorted(sizes, key=lambda size: abs(size - layout.stages))[:2])
        advice = f" Nearest numbers of stages: {', '.join(map(str, near))}." if near else ""
        raise ConfigError(
            f"{stack.path} has {stack.count} layers, which cannot be divided evenly into {of} (mesh axis "
            f"'pipeline'={layout.stages}).{advice} Or change mesh.pipeline.chunks or the number of layers"
        )
    layout.pipeline.table(layout.stages, microbatches)
    return stack


def _stacks(model: Config) -> Iterator[PipelinedStack]:
    """The outermost stacks of equal layers."""
    found: list[str] = []
    for path, node in walk(model):
        if not isinstance(node, Stack.Config) or not node.is_sequential or any(_below(path, each) for each in found):
            continue
        places = node.places()
        if len({place.path for place in places}) == 1 and all(len(place.index) == 1 for place in places):
            found.append(path)
            remat: Remat | None = getattr(node, "remat", None)
            remat = None if remat is None else remat.for_layer(places[0].config)
            yield PipelinedStack(path, places[0].path, len(places), remat, getattr(node, "unroll", 1))


def _below(path: str, above: str) -> bool:
    return path.startswith(f"{above}.")


def _divided(tree: Tree, names: Names) -> tuple[Tree, Tree]:
    if not names or not tree:
        return tree, {}
    layers, inner = _divided(tree.get(names[0], {}), names[1:])
    rest = {name: each for name, each in tree.items() if name != names[0]}
    return layers, rest | ({names[0]: inner} if inner else {})


def _whole(layers: Tree, rest: Tree, names: Names) -> Tree:
    return layers if not names else {**rest, names[0]: _whole(layers, rest.get(names[0], {}), names[1:])}


def _without_layer(axes: Any) -> Any:  # Any: a tree, or the axes of one array
    if isinstance(axes, dict):
        return {name: _without_layer(each) for name, each in axes.items()}
    return tuple(None if name == "layer" else name for name in axes)
