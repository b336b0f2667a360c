"""The API for plugin authors, and the discovery of plugins. Imports neither jax nor flax."""

from axcore.plugin.accelerators import Accelerator
from axcore.plugin.attribution import attributed
from axcore.plugin.features import offered, use, use_text
from axcore.plugin.hooks import API_VERSION, hookimpl
from axcore.plugin.host import Host
from axcore.plugin.offers import (
    AdaptersOffer,
    AttentionKernelOffer,
    CallbackOffer,
    Check,
    Command,
    ContextParallelismOffer,
    DrafterOffer,
    EvaluatorOffer,
    Feature,
    GrammarCompilerOffer,
    GroupedMatmulOffer,
    KVCacheOffer,
    MeshRule,
    NumericsOffer,
    Offer,
    OptimizerOffer,
    PipelineScheduleOffer,
    Recipe,
    SourceOffer,
)
from axcore.plugin.recipes import recipe
from axcore.plugin.registry import Registry, active, contributors, registry, resolve, supplier
from axcore.plugin.states import Plugin, PluginError, State, Unavailable
from axcore.plugin.targets import mesh_rule, mesh_rules, recipe_of, target

__all__ = [
    "API_VERSION",
    "Accelerator",
    "AdaptersOffer",
    "AttentionKernelOffer",
    "CallbackOffer",
    "Check",
    "Command",
    "ContextParallelismOffer",
    "DrafterOffer",
    "EvaluatorOffer",
    "Feature",
    "GrammarCompilerOffer",
    "GroupedMatmulOffer",
    "Host",
    "KVCacheOffer",
    "MeshRule",
    "NumericsOffer",
    "Offer",
    "OptimizerOffer",
    "PipelineScheduleOffer",
    "Plugin",
    "PluginError",
    "Recipe",
    "Registry",
    "SourceOffer",
    "State",
    "Unavailable",
    "active",
    "attributed",
    "contributors",
    "hookimpl",
    "mesh_rule",
    "mesh_rules",
    "offered",
    "recipe",
    "recipe_of",
    "registry",
    "resolve",
    "supplier",
    "target",
    "use",
    "use_text",
]


def __dir__() -> list[str]:
    return __all__
