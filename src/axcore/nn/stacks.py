"""Numbering, editing and unstacking the layers of a model, for any `Stack`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import jax

from axcore.config import REQUIRED, Config, ConfigError, Where, has_field, select, shown_type, walk
from axcore.config.select import edited
from axcore.config.tree import NESTING, REMOVED, join, parts, rebuild
from axcore.module import DTypes, Layer, Tree
from axcore.nn.layer_stack import Place, Stack
from axcore.nn.transformer import Sequence
from axcore.parallel import Remat


def layers_of(decoder: Layer.Config) -> tuple[Place, ...]:
    """Every layer of a decoder in execution order, including the layers of nested stacks.

    Raises:
        ConfigError: the number of layers of a stack is REQUIRED.
    """
    return tuple(_places(Place("", (), decoder, "")))


def _places(place: Place) -> Iterator[Place]:
    if not isinstance(place.config, Stack.Config):
        yield place
        return
    for inner in place.config.places():
        path, node = join(place.path, inner.path), join(place.config_path, inner.config_path)
        yield from _places(Place(path, (*place.index, *inner.index), inner.config, node))


def by_layer(cfg: Config, paths: Iterable[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names the arrays of a model independently of how its layers are stacked.

    For example, `decoder.layers.attention.query.weight` of a `Repeat` contains the arrays of all layers, with the names
    `decoder.0.attention.query.weight`, `decoder.1.attention.query.weight` and so on.

    Args:
        cfg: config of the model.
        paths: paths of the arrays, such as the paths of the parameters.

    Returns:
        name -> (path, index on the leading axes). The name of an array outside all stacks is its path.
    """
    stacks: dict[str, tuple[Place, ...]] = {}
    for path, node in walk(cfg):
        if isinstance(node, Stack.Config) and not any(_is_below(path, stack) for stack in stacks):
            stacks[path] = layers_of(node)
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in paths:
        stack = next((each for each in stacks if _is_below(path, each)), "")
        inside = [
            (number, place, above)
            for number, place in enumerate(stacks.get(stack, ()))
            if _is_below(path, above := join(stack, place.path))
        ]
        found |= {
            join(stack, f"{number}.{path.removeprefix(above + '.')}"): (path, place.index)
            for number, place, above in inside
        }
        if not inside:
            found[path] = (path, ())
    return found


def edit_layers[C: Config](cfg: C, where: Where, edit: Callable[[str, Any, int], Config]) -> C:
    """Edits selected nodes by number. Numbers start at 0, follow execution order and count every layer of a `Repeat`.

    `Stack.Config.restack` rebuilds a stack whose layers become unequal: if an edit changes only odd-numbered layers, a
    `Repeat` becomes a scan over pairs. Nested stacks stay nested, since an inner stack may pass values between its
    layers.

    Args:
        where: selects nodes. Nodes inside a selected node are not selected.
        edit: `(path, node, number) -> node`, with the path of the node in `cfg`.

    Raises:
        ConfigError: nothing is selected, the number of layers of a stack is REQUIRED, or a stack cannot run the edited
            layers.
    """
    chosen = select(cfg, where).paths
    numbers = itertools.count()

    def below(node: object, path: str) -> Any:  # a node of the same kind: a config, or a tuple or mapping of them
        if isinstance(node, Config) and path in chosen:
            return edited(path, node, lambda path, node: edit(path, node, next(numbers)))
        if not any(_is_below(each, path) for each in chosen):
            return node
        places = node.places() if isinstance(node, Stack.Config) else ()
        containers = {place.config_path.partition(".")[0] for place in places}
        changes = {
            name: new
            for name, part in parts(node)
            if isinstance(part, NESTING)
            and name not in containers
            and (new := below(part, join(path, name))) is not part
        }
        node = rebuild(node, changes) if changes else node
        layers = tuple(below(place.config, join(path, place.config_path)) for place in places)
        if not isinstance(node, Stack.Config) or all(
            new is place.config for new, place in zip(layers, places, strict=True)
        ):
            return node
        try:
            return node.restack(tuple(layer for layer in layers if layer is not REMOVED))
        except ConfigError as error:
            raise ConfigError(f"at {path or 'the root'}: {error}") from error

    return below(cfg, "")


def use_remat[C: Config](cfg: C, remat: Remat | None, where: Where = Stack) -> C:
    """Sets the remat policy of each layer of the selected stacks.

    A stack of stacks, such as a `Repeat` of groups, gets no policy itself, so each layer is recomputed separately.

    Args:
        cfg: config of the model.
        remat: the policy; None: the backward pass keeps every intermediate value.
        where: selects stacks. A stack without a field `remat` is not changed.
    """

    def edit(_: str, node: Config) -> Config:
        if not has_field(node, "remat"):
            return node
        nested = all(isinstance(place.config, Stack.Config) for place in cast(Stack.Config, node).places())
        return node.set(remat=None if nested else remat)

    return select(cfg, where).map(edit)


def use_unroll[C: Config](cfg: C, unroll: bool) -> C:
    """Unrolls the loop of every scanned stack completely, or not at all.

    Unrolled layers run faster and compile more slowly. A stack without a field `unroll` is not changed.

    Args:
        cfg: config of the model.
    """

    def edit(_: str, node: Config) -> Config:
        if not has_field(node, "unroll"):
            return node
        return node.set(unroll=len(cast(Stack.Config, node).places()) if unroll else 1)

    return select(cfg, Stack).map(edit)


def unstacked[C: Config](cfg: C) -> C:
    """The model with each stack replaced by a `Sequence`, in which every layer has its own arrays.

    Nested stacks are flattened. A stack with `is_sequential=False` is not changed, and neither are the stacks inside
    it.
    """
    if isinstance(cfg, Stack.Config):
        if not cfg.is_sequential:
            return cfg
        input_dim = getattr(cfg, "input_dim", REQUIRED)
        made = Sequence.Config(input_dim=input_dim, layers=tuple(_flat(cfg)), dtypes=cfg.dtypes, tags=cfg.tags)
        return cast(C, made)
    changes = {
        name: new
        for name, part in parts(cfg)
        if isinstance(part, NESTING) and (new := unstacked(cast(Config, part))) is not part
    }
    return rebuild(cfg, changes) if changes else cfg


def _flat(stack: Stack.Config) -> Iterator[Layer.Config]:
    for place in stack.places():
        if isinstance(place.config, Stack.Config) and place.config.is_sequential:
            for layer in _flat(place.config):
                types = place.config.dtypes if layer.target.uses_dtypes else None
                yield layer.set(dtypes=(layer.dtypes or DTypes()).over(types)) if types is not None else layer
        else:
            yield unstacked(place.config)


def unstack_arrays(cfg: Config, tree: Tree) -> Tree:
    """Converts the arrays of a model to the structure of `unstacked(cfg)`, by slicing stacked arrays into layers.

    The function can be jitted, with output shardings. XLA reuses donated arrays that are not stacked; a stacked array
    and its slices exist at the same time.

    Args:
        cfg: config of the model before `unstacked`.
        tree: its parameters, its other state, or a tree of the same structure.

    Raises:
        ConfigError: a stack with `is_sequential=True` has arrays outside its layers.
    """
    if isinstance(cfg, Stack.Config):
        if not cfg.is_sequential:
            return tree
        layers = {number: arrays for number, arrays in enumerate(_flat_arrays(cfg, tree)) if arrays}
        return {"layers": layers} if layers else {}
    new: dict[Any, Any] = dict(tree)
    for name, part in parts(cfg):
        key = _key(name)
        if isinstance(part, NESTING) and isinstance(below := tree.get(key), dict):
            new[key] = unstack_arrays(cast(Config, part), below)
    return new


def _flat_arrays(stack: Stack.Config, tree: Tree) -> Iterator[Tree]:
    places = stack.places()
    if own := tree.keys() - {place.path.partition(".")[0] for place in places}:
        raise ConfigError(
            f"{shown_type(type(stack))} has the arrays {', '.join(sorted(map(str, own)))} outside its layers, so "
            f"it does more than apply its layers in order; set is_sequential to False"
        )
    for place in places:
        below = functools.reduce(lambda below, name: below.get(_key(name), {}), place.path.split("."), tree)
        below = jax.tree.map(lambda leaf, index=place.index: leaf[index] if index else leaf, below)
        if isinstance(place.config, Stack.Config) and place.config.is_sequential:
            yield from _flat_arrays(place.config, below)
        else:
            yield unstack_arrays(place.config, below)


def _is_below(path: str, above: str) -> bool:
    return not above or path.startswith(f"{above}.")


def _key(name: str) -> Any:
    """The key of a path segment in a tree of arrays; elements of lists have integer keys."""
    return int(name) if name.isdigit() else name
