"""Filling a slot by the name of an offer, and guarding what another plugin has put into one."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Iterator
from typing import Any

from axcore.config import REQUIRED, Config, ConfigError, Configurable, Where, get, has_field, select, type_name, walk
from axcore.config.node import default, field_names
from axcore.config.tree import NESTING, join, parts
from axcore.config.types import conforms, describe, hints
from axcore.plugin.active import supplier
from axcore.plugin.offers import Feature, Offer
from axcore.plugin.states import CORE, Plugin, PluginError


def filler(plugin: Plugin, offer: Offer, cls: Any) -> Callable[..., Config]:
    """A function `fill(cfg, *, where=None, **options)` that puts `cls.Config(**options)` into every slot for it.

    The slots are the fields named `offer.slot`, of the nodes that `where` selects or else of all whose field takes such
    a value; of a wrapper and what it wraps, the inner one. Its signature lists the fields of `cls.Config`.

    Raises:
        PluginError: `cls` has no Config, or its Config has a field `where`.
    """
    if not (isinstance(cls, type) and issubclass(cls, Configurable)) or not hasattr(cls, "Config"):
        raise PluginError(
            f"the {offer.kind} {offer.name!r} of {plugin} must name a class with a Config, not {reprlib.repr(cls)}"
        )
    slot, node_type = offer.slot, cls.Config
    if "where" in field_names(node_type):
        raise PluginError(
            f"the {offer.kind} {offer.name!r} of {plugin} has a field 'where', which the option of `use` that selects "
            "nodes would hide; name it differently"
        )

    def fill(cfg: Config, /, *, where: Where | None = None, **options: Any) -> Config:
        new = node_type(**options)
        nodes = walk(cfg) if where is None else select(cfg, where)
        has_slot = [(path, node) for path, node in nodes if has_field(node, slot)]
        # Nodes that are named must take it; of the others, those whose field only has the same name are passed over.
        chosen = {path for path, node in has_slot if where is not None or conforms(new, _hint(node, slot))}
        if not chosen:
            raise ConfigError(_no_slot(slot, new, has_slot))
        return select(cfg, lambda path, _: path in chosen).map(lambda _, node: put(node, slot, new))

    def option(name: str, hint: Any, default: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)

    known = hints(node_type)
    options = {name: option(name, known.get(name, Any), default(node_type, name)) for name in field_names(node_type)}
    options["where"] = option("where", Where | None, None)
    cfg = inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
    fill.__signature__ = inspect.Signature([cfg, *options.values()])  # type: ignore[attr-defined]
    return fill


def put(node: Config, slot: str, new: Config | None) -> Config:
    """Puts `new` into a node's slot; None empties it. What stands there and has a slot of the same name is a wrapper:
    it stays, and its own slot is filled."""
    held = getattr(node, slot)
    return node.set(**{slot: put(held, slot, new) if isinstance(held, Config) and has_field(held, slot) else new})


def _hint(node: Config, field: str) -> Any:
    return hints(type(node)).get(field, Any)


def _no_slot(slot: str, new: Config, has_slot: list[tuple[str, Config]]) -> str:
    if not has_slot:
        return f"no node has a field {slot!r} for it"
    path, node = has_slot[0]
    return f"{join(path, slot)} must be {describe(_hint(node, slot))}, not {type_name(type(new))}"


def guard(plugin: Plugin, before: Config, after: Config) -> None:
    """Refuses an edit that puts something of `plugin` where another plugin's node was.

    Wrapping that node is no such thing, and neither is editing it. The core gives way: its nodes may be replaced, and
    its offers put a slot back into its first state. A slot that goes together with the node that held it is not
    claimed by anyone, and nodes of a plugin that attaches nothing (a recipe's own corpus) are not claims.

    Raises:
        ConfigError: names the path, both plugins and the remedy.
    """
    if plugin.id == CORE:
        return
    for path, other in _lost(before, after, after, "", plugin):
        raise ConfigError(
            f"{path or 'the root'} was filled by {other.id} ({other}), and {plugin.id} ({plugin}) would replace it; "
            f"do not attach both, or {_remedy(before, path)} in between"
        )


def _lost(old: Any, new: Any, scope: Any, path: str, editor: Plugin) -> Iterator[tuple[str, Plugin]]:
    """Nodes that other plugins supplied and that are gone, with their suppliers.

    Args:
        old, new: what was and what is at `path`.
        scope: where in the new tree a node of `old` may be: `new`, or the node above when that was replaced or wrapped.
    """
    if old is new:
        return
    other = _claimant(old)
    if other not in (None, editor) and not any(type(node) is type(old) for _, node in walk(scope)):
        yield path, other
        return
    below = dict(parts(new))
    for name, part in parts(old):
        if isinstance(part, NESTING) and name in below:
            inside = below[name] if type(new) is type(old) else new
            yield from _lost(part, below[name], inside, join(path, name), editor)


def _claimant(node: Any) -> Plugin | None:
    """The plugin that attached a node; None for other nodes and values."""
    plugin = supplier(node) if isinstance(node, Config) else None
    if plugin is not None and any(isinstance(offer, Feature) or offer.slot for offer in plugin.offers):
        return plugin
    return None


def _remedy(root: Config, path: str) -> str:
    """How a user empties a slot, or puts back what the model's author had there."""
    above, _, name = path.rpartition(".")
    parent = get(root, above)
    if not isinstance(parent, Config) or conforms(None, _hint(parent, name)):
        return f"empty the slot with axcore.select(cfg, {path!r}).remove()"
    declared = default(type(parent), name)
    if declared is REQUIRED:
        return f"set another {name} with axcore.select(cfg, {above!r}).set({name}=...)"
    value = f"{type(declared).__qualname__}({repr(declared).partition('(')[2]}"
    return f"give the slot back with axcore.select(cfg, {above!r}).set({name}={value})"
