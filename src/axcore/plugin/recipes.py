"""Recipes by name."""

from __future__ import annotations

from axcore.config import Config, acting, did_you_mean
from axcore.plugin.attribution import attributed
from axcore.plugin.offers import Recipe
from axcore.plugin.registry import registry, resolve
from axcore.plugin.states import PluginError


def recipe(name: str) -> Config:
    """The config of a recipe.

    Raises:
        PluginError: no plugin offers a recipe of this name, or its function fails or returns no config.
    """
    found = registry.find(Recipe, name)
    if found is None:
        names = list(dict.fromkeys(offer.name for _, offer in registry().offers(Recipe)))
        none = f"No loaded plugin offers recipes; {registry().advice('recipes')}"
        listed = f"Known: {', '.join(names)}" if names else none
        raise PluginError(f"there is no recipe {name!r}.{did_you_mean(name, names)} {listed}{registry().not_loaded()}")
    plugin, offer = found
    compose = resolve(plugin, offer)
    with acting(f"recipe {name}"), attributed(f"recipe {name!r} ({plugin})"):
        cfg = compose()
    if not isinstance(cfg, Config):
        raise PluginError(f"recipe {name!r} ({plugin}) returned {type(cfg).__name__}, not a config")
    return cfg
