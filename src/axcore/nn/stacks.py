"""The layers of a decoder by number, whatever `Repeat`s and `Sequence`s they are wrapped in."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence as Many
from typing import Any

from axcore.config import REQUIRED, Config, ConfigError, Where, select, type_name, walk
from axcore.config.select import edited
from axcore.config.tree import NESTING, join, parts, rebuild
from axcore.module import Layer
from axcore.nn.transformer import Repeat, Sequence
from axcore.parallel import Remat


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one layer of a decoder is.

    Attributes:
        path: of the layer's parameters, from the decoder on; `layers` in a `Repeat`, `layers.3` in a `Sequence`.
        index: its index on the leading axes of those parameters: one for each `Repeat` around it.
        config: what it is built from.
    """

    path: str
    index: tuple[int, ...]
    config: Any


def layers_of(decoder: Layer.Config) -> tuple[Place, ...]:
    """Every layer of a decoder, in the order in which they run.

    Raises:
        ConfigError: a `Repeat` whose number of layers is REQUIRED.
    """
    return tuple(_places(decoder, "", ()))


def _places(node: Any, path: str, index: tuple[int, ...]) -> Iterator[Place]:
    if isinstance(node, Repeat.Config):
        for number in range(_count(node)):
            yield from _places(node.layers, join(path, "layers"), (*index, number))
    elif isinstance(node, Sequence.Config):
        for number, layer in enumerate(node.layers):
            yield from _places(layer, join(path, f"layers.{number}"), index)
    else:
        yield Place(path, index, node)


def by_layer(cfg: Config, paths: Iterable[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names of a model's arrays that do not depend on how its layers are stacked.

    `decoder.layers.attention.query.weight` of a `Repeat` is many arrays: `decoder.0.attention.query.weight` and so on.

    Args:
        paths: of the arrays, as those of its parameters.

    Returns:
        name -> (path, index on the leading axes). What is in no stack has its path as name.
    """
    of_stack: dict[str, tuple[tuple[int, Place], ...]] = {}
    inside: list[str] = []
    for path, node in walk(cfg):
        if isinstance(node, Repeat.Config | Sequence.Config) and not any(path.startswith(each) for each in inside):
            of_stack[path] = tuple(enumerate(layers_of(node)))
            inside.append(f"{path}." if path else "")
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in paths:
        stack = next((each for each in of_stack if name.startswith(f"{each}." if each else "")), None)
        if stack is None:
            found[name] = (name, ())
            continue
        for number, place in of_stack[stack]:
            prefix = f"{join(stack, place.path)}."
            if name.startswith(prefix):
                found[join(stack, f"{number}.{name.removeprefix(prefix)}")] = (name, place.index)
    return found


def stacked(layers: Many[Layer.Config], *, remat: Remat | None = None, unroll: int = 1) -> Layer.Config:
    """A decoder that runs these layers, with each stretch of equal layers, or of equal groups of layers, in one scan.

    All equal: one `Repeat`. Otherwise a `Repeat` of a `Sequence` (five local layers and a global one, many times), or a
    `Sequence` of such (some dense layers, then many with experts).

    Args:
        remat: of each layer.
        unroll: layers in one step of a loop.

    Raises:
        ConfigError: there are none.
    """
    if not layers:
        raise ConfigError("a decoder needs at least one layer")
    groups: list[tuple[tuple[Layer.Config, ...], int]] = []
    start = 0
    while start < len(layers):
        size, count = _longest(layers, start)
        group = tuple(layers[start : start + size])
        if count == 1 and groups and groups[-1][1] == 1:  # what does not repeat is one group: its layers can share
            groups[-1] = ((*groups[-1][0], *group), 1)
        else:
            groups.append((group, count))
        start += size * count

    def repeated(group: tuple[Layer.Config, ...], count: int) -> Repeat.Config:
        steps = min(count, -(-unroll // len(group)))
        if len(group) == 1 and getattr(group[0], "remat", None) is None:
            return Repeat.Config(num_layers=count, layers=group[0], remat=remat, unroll=steps)
        one = group[0] if len(group) == 1 else Sequence.Config(layers=group, remat=remat)
        return Repeat.Config(num_layers=count, layers=one, unroll=steps)

    parts = tuple(repeated(*each) for each in groups)
    return parts[0] if len(parts) == 1 else Sequence.Config(layers=parts)


def _longest(layers: Many[Layer.Config], start: int) -> tuple[int, int]:
    """(size, count) of the repeated group that covers most layers from `start` on; of those the smallest."""
    best = (1, 1)
    for size in range(1, (len(layers) - start) // 2 + 1):
        group, count = layers[start : start + size], 1
        while layers[start + count * size : start + (count + 1) * size] == group:
            count += 1
        if count > 1 and size * count > best[0] * best[1]:
            best = (size, count)
    return best


def edit_layers[C: Config](cfg: C, where: Where, edit: Callable[[str, Any, int], Any]) -> C:
    """Edits selected nodes by number: the first in running order is 0, and every layer of a `Repeat` counts.

    Where layers of a `Repeat` come out unequal, it is made anew of groups (see `stacked`): with an edit that changes
    odd numbers only, it becomes a scan over pairs.

    Args:
        where: which nodes.
        edit: `(path, node, number) -> node`; the path is that in `cfg`. Nothing is selected inside a selected node.

    Raises:
        ConfigError: nothing is selected, or a `Repeat` whose number of layers is REQUIRED.
    """
    chosen = select(cfg, where).paths
    numbers = itertools.count()

    def below(node: Any, path: str) -> Any:
        if path in chosen:
            return edited(path, node, lambda path, node: edit(path, node, next(numbers)))
        if not any(not path or each.startswith(f"{path}.") for each in chosen):
            return node
        if isinstance(node, Repeat.Config):
            return _restacked(node, [below(node.layers, join(path, "layers")) for _ in range(_count(node))], path)
        changes = {name: below(part, join(path, name)) for name, part in parts(node) if isinstance(part, NESTING)}
        return rebuild(node, {name: new for name, new in changes.items() if new is not dict(parts(node))[name]})

    return below(cfg, "")


def _restacked(node: Repeat.Config, layers: list[Any], path: str) -> Layer.Config:
    """A decoder in place of `node` that runs these layers. Groups stay whole, for layers of one may share values."""
    if all(layer == layers[0] for layer in layers):
        return node.set(layers=layers[0])
    if type(node) is not Repeat.Config:
        raise ConfigError(
            f"at {path or 'the root'}: the edit makes layers of a {type_name(type(node))} unequal, and only those of "
            f"a Repeat can be stacked anew"
        )
    return stacked(layers, remat=node.remat, unroll=node.unroll).set(dtypes=node.dtypes, tags=node.tags)


def use_remat[C: Config](cfg: C, remat: Remat | None, where: Where = Repeat) -> C:
    """Sets what the backward pass keeps of each layer of the selected stacks, be they in groups or not."""

    def edit(_: str, node: Any) -> Any:
        if isinstance(node.layers, Sequence.Config) and node.remat is None:
            return node.set(layers=node.layers.set(remat=remat))
        return node.set(remat=remat)

    return select(cfg, where).map(edit)


def _count(node: Repeat.Config) -> int:
    if node.num_layers is REQUIRED:
        raise ConfigError("num_layers of a Repeat is REQUIRED; set it first, so that its layers can be told apart")
    return node.num_layers
