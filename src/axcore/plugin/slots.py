"""Fills slots with offers, without replacing the nodes of other plugins."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping

from axcore.config import Config, ConfigError, Configurable, Where, get, has_field, select, shown_type, walk
from axcore.config.tree import NESTING, join, parts
from axcore.config.types import conforms, hints
from axcore.plugin.attribution import attributed
from axcore.plugin.offers import Feature, Offer
from axcore.plugin.registry import resolve, supplier
from axcore.plugin.states import CORE, Plugin, PluginError


def config_type(plugin: Plugin, offer: Offer) -> type[Config]:
    """The type of the node that an offer puts into a slot: its target if that is a Config, or else `target.Config`.

    Raises:
        PluginError: the target cannot be loaded, or has no Config.
    """
    cls = resolve(plugin, offer)
    if isinstance(cls, type) and issubclass(cls, Config):
        return cls
    if not (isinstance(cls, type) and issubclass(cls, Configurable)) or not hasattr(cls, "Config"):
        raise PluginError(f"the {offer.kind} {offer.name!r} of {plugin} must name a class with a Config, not {cls!r}")
    made: type[Config] = cls.Config
    return made


def filler(plugin: Plugin, offer: Offer) -> Callable[..., Config]:
    """A function `fill(cfg, *, where=None, **options)` that puts the offered Config into every slot for it.

    The slots are the fields named `offer.slot` of the nodes that `where` selects, or else of all nodes whose field
    accepts the value. In a wrapper, the innermost slot is filled. The signature lists the fields of the Config.

    Raises:
        PluginError: see `config_type`.
    """
    slot, node_type = offer.slot, config_type(plugin, offer)

    def fill(cfg: Config, /, *, where: Where | None = None, **options: object) -> Config:
        new: Config = node_type(**options)
        value = {offer.name: new} if offer.keyed else new
        nodes = walk(cfg) if where is None else select(cfg, where)
        has_slot = [(path, node) for path, node in nodes if has_field(node, slot)]
        # Without `where`, fields of the same name and another type are skipped.
        chosen = {path for path, node in has_slot if where is not None or accepts(node, slot, value)}
        if not chosen:
            among = "of the config" if where is None else f"that where={where!r} selects"
            raise ConfigError(
                f"no node {among} has a slot {slot!r} for {shown_type(node_type)}. Use it with a config that has such "
                f"a slot" + ("" if where is None else ", or select other nodes")
            )
        found = select(cfg, lambda path, _: path in chosen)
        if not offer.keyed:
            return found.put(**{slot: new})
        return found.map(lambda path, node: _add(join(path, slot), node, slot, offer.name, new))

    known = hints(node_type)
    cfg = inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
    options = [each.replace(annotation=known[name]) for name, each in inspect.signature(node_type).parameters.items()]
    selected = inspect.Parameter("where", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Where | None)
    fill.__signature__ = inspect.Signature([cfg, *options, selected])  # type: ignore[attr-defined]
    return fill


def _add(path: str, node: Config, slot: str, key: str, new: Config) -> Config:
    """Adds `new` to a mapping of a node. An entry of the same class is replaced."""
    held = getattr(node, slot)
    entries = dict(held) if isinstance(held, Mapping) else {}
    old = entries.get(key)
    if old is not None and type(old) is not type(new):
        owner = f" of {plugin.id} ({plugin})" if (plugin := supplier(old)) else ""
        where = join(path, key)
        raise ConfigError(
            f"{where} already holds {shown_type(type(old))}{owner}, not {shown_type(type(new))}. Remove it first: "
            f"axcore.select(cfg, {where!r}).remove()"
        )
    return node.set(**{slot: {**entries, key: new}})


def accepts(node: Config, field: str, value: object) -> bool:
    """Whether a value has the type of this field of a node."""
    return conforms(value, _hint(node, field))


def _hint(node: Config, field: str) -> object:
    return hints(type(node)).get(field, object)


def guarded(plugin: Plugin, owner: str, edit: Callable[[Config], Config]) -> Callable[[Config], Config]:
    """Wraps an edit of `plugin` so that its errors name `owner` and it cannot replace the nodes of other plugins."""

    def checked(cfg: Config) -> Config:
        with attributed(owner):
            new = edit(cfg)
            if isinstance(new, Config):
                guard(plugin, cfg, new)
            return new

    return checked


def guard(plugin: Plugin, before: Config, after: Config) -> None:
    """Checks that an edit of `plugin` does not replace a node of another plugin.

    The edit may wrap such a node or change its fields. The check does not apply to

    - edits by built-in offers, which may replace any node;
    - nodes of the core, and nodes of plugins that offer nothing that `use` attaches, such as plugins with only recipes;
    - a node that disappears together with its parent.

    Raises:
        ConfigError: the edit replaces a node. The message names the path and both plugins.
    """
    if plugin.id == CORE:
        return
    for path, other in _lost(before, after, after, "", plugin):
        raise ConfigError(
            f"{path or 'the root'} holds a node of {other.id} ({other}), which {plugin.id} ({plugin}) would replace. "
            f"Attach only one of them, or first {_remedy(before, path)}"
        )


def _lost(old: object, new: object, scope: object, path: str, editor: Plugin) -> Iterator[tuple[str, Plugin]]:
    """(path, plugin) of each node of another plugin that the edit removed.

    Args:
        old: the value at `path` before the edit.
        new: the value at `path` after the edit.
        scope: the part of the new tree to search for nodes of `old`: `new`, or the node above if that was replaced or
            wrapped.
    """
    if old is new:
        return
    other = _claimant(old)
    if other is not None and other.id != editor.id and not any(type(node) is type(old) for _, node in walk(scope)):
        yield path, other
        return
    below = dict(parts(new))
    for name, part in parts(old):
        if isinstance(part, NESTING) and name in below:
            inside = below[name] if type(new) is type(old) else new
            yield from _lost(part, below[name], inside, join(path, name), editor)


def _claimant(node: object) -> Plugin | None:
    """The plugin of a node that `use` may have attached; None for other nodes and values."""
    plugin = supplier(node) if isinstance(node, Config) else None
    if plugin is not None and any(isinstance(offer, Feature) or offer.slot for offer in plugin.offers):
        return plugin
    return None


def _remedy(root: Config, path: str) -> str:
    """How a user empties a slot, or replaces its node if the slot does not accept None."""
    above, _, name = path.rpartition(".")
    parent = get(root, above)
    if not isinstance(parent, Config) or conforms(None, _hint(parent, name)):
        return f"empty the slot with axcore.select(cfg, {path!r}).remove()"
    return f"set another {name} with axcore.select(cfg, {above!r}).set({name}=...)"
