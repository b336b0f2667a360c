"""The hook specs: the functions that a plugin module may implement, by family.

A plugin is a module that an entry point of the group `axcore.plugins` names. It imports neither jax nor flax, marks the
hooks that it implements with `hookimpl`, and describes what it offers; the heavy code is imported when a config names
it. An implementation may take fewer arguments than its spec, so that arguments can be added later.

```python
from axcore.plugin import Feature, hookimpl

@hookimpl
def axcore_features():
    return [Feature("rope", "axcore_rope.rotary:use_rope", "Rotary position embedding.")]
```
"""

from __future__ import annotations

import pluggy

from axcore.plugin.offers import AttentionKernel, Command, Feature, KVCache, MeshRule, Offer, Recipe

API_VERSION = 1
"""The version of these specs, apart from the package's. A plugin module may state the one it needs as `axcore_api`."""

PROJECT = "axcore"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class LayerHooks:
    """Layer types and the features that attach them."""

    @hookspec
    def axcore_features(self) -> list[Feature]:  # type: ignore[empty-body]
        """Named modifiers for `axcore.use(name, **options)`."""


class AttentionHooks:
    """How attention is computed."""

    @hookspec
    def axcore_attention_kernels(self) -> list[AttentionKernel]:  # type: ignore[empty-body]
        """Layers for the kernel slot of attention."""


class KVCacheHooks:
    """How keys and values are kept while decoding."""

    @hookspec
    def axcore_kv_caches(self) -> list[KVCache]:  # type: ignore[empty-body]
        """Layers for the cache slot of attention."""


class ParallelismHooks:
    """How a config is laid out on hardware."""

    @hookspec
    def axcore_mesh_rules(self) -> list[MeshRule]:  # type: ignore[empty-body]
        """Modifiers by accelerator."""


class ProgramHooks:
    """What people run."""

    @hookspec
    def axcore_recipes(self) -> list[Recipe]:  # type: ignore[empty-body]
        """Whole configs, by name."""

    @hookspec
    def axcore_commands(self) -> list[Command]:  # type: ignore[empty-body]
        """Subcommands of the `axcore` command."""


OFFERS: dict[str, type[Offer]] = {
    "axcore_features": Feature,
    "axcore_attention_kernels": AttentionKernel,
    "axcore_kv_caches": KVCache,
    "axcore_mesh_rules": MeshRule,
    "axcore_recipes": Recipe,
    "axcore_commands": Command,
}
"""What each hook returns a list of."""

FAMILIES = (LayerHooks, AttentionHooks, KVCacheHooks, ParallelismHooks, ProgramHooks)
