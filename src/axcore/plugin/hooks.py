"""The hooks that a plugin module may implement, one for each kind of offer.

A plugin is a module that an entry point of the group `axcore.plugins` names. It imports neither jax nor flax, marks its
hooks with `hookimpl`, and returns offers. Each hook is called at discovery, and may take the argument `host`.

```python
from axcore.plugin import Feature, hookimpl

axcore_api = 2

@hookimpl
def axcore_features():
    return [Feature("rope", "axcore_rope.feature:use_rope", "Rotary position embedding.")]
```

pluggy compares every implementation with the specification. An implementation may take fewer arguments, so a new
argument does not break plugins. A hook of a newer axcore can be implemented with `hookimpl(optionalhook=True)`. The
meaning of an argument and the return type of a hook change only with `API_VERSION`.
"""

from __future__ import annotations

import pluggy

from axcore.plugin.host import Host
from axcore.plugin.offers import OFFERS, Offer

API_VERSION = 2
"""The version of the plugin API. A plugin module declares the version that it requires as `axcore_api`."""

PROJECT = "axcore"
hookimpl = pluggy.HookimplMarker(PROJECT)


@pluggy.HookspecMarker(PROJECT)
def _specification(host: Host) -> list[Offer]:
    raise NotImplementedError


def manager() -> pluggy.PluginManager:
    """A plugin manager with the hook specifications and no plugins."""
    made = pluggy.PluginManager(PROJECT)
    made.add_hookspecs(type("Hooks", (), {hook: staticmethod(_specification) for hook in OFFERS}))
    return made
