"""Filling a slot by the name of an offer, without replacing what another plugin has put there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping

from axcore.config import Config, ConfigError, Configurable, Where, get, has_field, select, type_name, walk
from axcore.config.node import default, field_names
from axcore.config.tree import NESTING, join, parts
from axcore.config.types import conforms, hints
from axcore.plugin.attribution import attributed
from axcore.plugin.offers import Feature, Offer
from axcore.plugin.registry import supplier
from axcore.plugin.states import CORE, Plugin, PluginError


def filler(plugin: Plugin, offer: Offer, cls: object) -> Callable[..., Config]:
    """A function `fill(cfg, *, where=None, **options)` that puts `cls.Config(**options)` into every slot for it.

    The slots are the fields named `offer.slot` of the nodes that `where` selects, or else of all nodes whose field
    accepts the value. In a wrapper, the innermost slot is filled. The signature lists the fields of `cls.Config`.

    Raises:
        PluginError: `cls` has no Config.
    """
    if not (isinstance(cls, type) and issubclass(cls, Configurable)) or not hasattr(cls, "Config"):
        raise PluginError(f"the {offer.kind} {offer.name!r} of {plugin} must name a class with a Config, not {cls!r}")
    slot, node_type = offer.slot, cls.Config

    def fill(cfg: Config, /, *, where: Where | None = None, **options: object) -> Config:
        new: Config = node_type(**options)
        value = {offer.name: new} if offer.keyed else new
        nodes = walk(cfg) if where is None else select(cfg, where)
        has_slot = [(path, node) for path, node in nodes if has_field(node, slot)]
        # Without `where`, a field of the same name and another type is passed over.
        chosen = {path for path, node in has_slot if where is not None or conforms(value, _hint(node, slot))}
        if not chosen:
            raise ConfigError(f"no node has a field {slot!r} that takes {type_name(node_type)}")
        edit = _add if offer.keyed else put
        name = join(slot, offer.name) if offer.keyed else slot
        return select(cfg, lambda path, _: path in chosen).map(lambda _, node: edit(node, name, new))

    known = hints(node_type)
    options = {name: (known.get(name, object), default(node_type, name)) for name in field_names(node_type)}
    cfg = inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
    listed = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=hint)
        for name, (hint, value) in {**options, "where": (Where | None, None)}.items()
    ]
    fill.__signature__ = inspect.Signature([cfg, *listed])  # type: ignore[attr-defined]
    return fill


def put(node: Config, slot: str, new: Config | None) -> Config:
    """Puts `new` into a node's slot; None empties it. A node there with a slot of the same name is a wrapper: it stays,
    and its own slot is filled."""
    held = getattr(node, slot)
    return node.set(**{slot: put(held, slot, new) if isinstance(held, Config) and has_field(held, slot) else new})


def _add(node: Config, entry: str, new: Config) -> Config:
    """Adds `new` to a mapping of a node; `entry` is its field and key. An entry of the same class is replaced."""
    slot, _, key = entry.partition(".")
    held = getattr(node, slot)
    entries = dict(held) if isinstance(held, Mapping) else {}
    old = entries.get(key)
    if old is not None and type(old) is not type(new):
        owner = f" of {plugin.id} ({plugin})" if (plugin := supplier(old)) else ""
        raise ConfigError(f"{entry} is {type_name(type(old))}{owner} already; remove it before adding another")
    return node.set(**{slot: {**entries, key: new}})


def _hint(node: Config, field: str) -> object:
    return hints(type(node)).get(field, object)


def guarded(plugin: Plugin, owner: str, edit: Callable[[Config], Config]) -> Callable[[Config], Config]:
    """An edit of `plugin` whose errors name `owner`, and which cannot replace what another plugin has put there."""

    def checked(cfg: Config) -> Config:
        with attributed(owner):
            new = edit(cfg)
            if isinstance(new, Config):
                guard(plugin, cfg, new)
            return new

    return checked


def guard(plugin: Plugin, before: Config, after: Config) -> None:
    """Checks that an edit of `plugin` puts nothing in place of another plugin's node.

    Wrapping and editing that node are allowed. The core's nodes may be replaced, and the core's offers reset a slot.
    A slot that disappears together with the node that held it is not protected, and neither are the nodes of a plugin
    that attaches nothing, such as those of a recipe.

    Raises:
        ConfigError: names the path, both plugins and what to do.
    """
    if plugin.id == CORE:
        return
    for path, other in _lost(before, after, after, "", plugin):
        raise ConfigError(
            f"{path or 'the root'} was filled by {other.id} ({other}), and {plugin.id} ({plugin}) would replace it; "
            f"do not attach both, or {_remedy(before, path)} in between"
        )


def _lost(old: object, new: object, scope: object, path: str, editor: Plugin) -> Iterator[tuple[str, Plugin]]:
    """The nodes of other plugins that are gone, with their plugins.

    Args:
        old: the value at `path` before the edit.
        new: the value at `path` after the edit.
        scope: where in the new tree a node of `old` may be: `new`, or the node above if that was replaced or wrapped.
    """
    if old is new:
        return
    other = _claimant(old)
    if other is not None and other is not editor and not any(type(node) is type(old) for _, node in walk(scope)):
        yield path, other
        return
    below = dict(parts(new))
    for name, part in parts(old):
        if isinstance(part, NESTING) and name in below:
            inside = below[name] if type(new) is type(old) else new
            yield from _lost(part, below[name], inside, join(path, name), editor)


def _claimant(node: object) -> Plugin | None:
    """The plugin that attached a node; None for other nodes and values."""
    plugin = supplier(node) if isinstance(node, Config) else None
    if plugin is not None and any(isinstance(offer, Feature) or offer.slot for offer in plugin.offers):
        return plugin
    return None


def _remedy(root: Config, path: str) -> str:
    """How a user empties a slot, or one that cannot be empty."""
    above, _, name = path.rpartition(".")
    parent = get(root, above)
    if not isinstance(parent, Config) or conforms(None, _hint(parent, name)):
        return f"empty the slot with axcore.select(cfg, {path!r}).remove()"
    return f"set another {name} with axcore.select(cfg, {above!r}).set({name}=...)"
