"""What plugin authors import, and how plugins are found. Imports neither jax nor flax."""

from axcore.plugin.active import active, supplier
from axcore.plugin.features import use, use_text
from axcore.plugin.hooks import API_VERSION, hookimpl
from axcore.plugin.host import Host
from axcore.plugin.offers import (
    AttentionKernel,
    CheckpointFormat,
    Command,
    Feature,
    InputSource,
    KVCache,
    MeshRule,
    NumericsOffer,
    Offer,
    Optimizer,
    Recipe,
)
from axcore.plugin.recipes import current_recipe, recipe
from axcore.plugin.registry import Registry, registry, resolve
from axcore.plugin.states import Plugin, PluginError, State, Unavailable
from axcore.plugin.targets import Accelerator, mesh_rules, target

__all__ = [
    "API_VERSION",
    "Accelerator",
    "AttentionKernel",
    "CheckpointFormat",
    "Command",
    "Feature",
    "Host",
    "InputSource",
    "KVCache",
    "MeshRule",
    "NumericsOffer",
    "Offer",
    "Optimizer",
    "Plugin",
    "PluginError",
    "Recipe",
    "Registry",
    "State",
    "Unavailable",
    "active",
    "current_recipe",
    "hookimpl",
    "mesh_rules",
    "recipe",
    "registry",
    "resolve",
    "supplier",
    "target",
    "use",
    "use_text",
]
