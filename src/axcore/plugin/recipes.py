"""Recipes by name."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
from collections.abc import Iterator

from axcore.config import Config, acting, did_you_mean
from axcore.plugin.faults import blaming
from axcore.plugin.offers import Recipe
from axcore.plugin.registry import registry, resolve
from axcore.plugin.states import PluginError

_name: contextvars.ContextVar[str | None] = contextvars.ContextVar("axcore_recipe", default=None)


def current_recipe() -> str | None:
    """The recipe that is being composed, for messages."""
    return _name.get()


@contextlib.contextmanager
def composing(name: str) -> Iterator[None]:
    token = _name.set(name)
    try:
        with acting(f"recipe {name}"):
            yield
    finally:
        _name.reset(token)


def recipe(name: str) -> Config:
    """The config of a registered recipe.

    Raises:
        PluginError: there is none of that name (the nearest is suggested), or it needs a plugin that is missing.
    """
    found = registry().find(Recipe, name)
    if found is None:
        names = list(dict.fromkeys(offer.name for _, offer in registry().offers(Recipe)))
        none = f"No plugin that is loaded brings any; {registry().advice('recipes')}"
        listed = f"Known: {', '.join(names)}" if names else none
        raise PluginError(f"there is no recipe {name!r}.{did_you_mean(name, names)} {listed}{registry().not_loaded()}")
    plugin, offer = found
    compose = resolve(plugin, offer)
    try:
        inspect.signature(compose).bind()
    except (TypeError, ValueError) as error:
        raise PluginError(f"recipe {name!r} ({plugin}) must need no arguments: {error}") from None
    with composing(name), blaming(f"recipe {name!r} ({plugin})"):
        cfg = compose()
    if not isinstance(cfg, Config):
        raise PluginError(f"recipe {name!r} ({plugin}) returned {type(cfg).__name__}, not a config")
    return cfg
