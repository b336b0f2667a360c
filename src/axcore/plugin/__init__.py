"""What plugin authors import, and how plugins are found. Imports neither jax nor flax."""

from axcore.plugin.active import active, supplier
from axcore.plugin.features import use, use_text
from axcore.plugin.hooks import API_VERSION, hookimpl
from axcore.plugin.offers import AttentionKernel, Command, Feature, KVCache, MeshRule, Offer, Recipe
from axcore.plugin.recipes import current_recipe, recipe
from axcore.plugin.registry import Plugin, PluginError, Registry, State, Unavailable, registry, resolve

__all__ = [
    "API_VERSION",
    "AttentionKernel",
    "Command",
    "Feature",
    "KVCache",
    "MeshRule",
    "Offer",
    "Plugin",
    "PluginError",
    "Recipe",
    "Registry",
    "State",
    "Unavailable",
    "active",
    "current_recipe",
    "hookimpl",
    "recipe",
    "registry",
    "resolve",
    "supplier",
    "use",
    "use_text",
]
