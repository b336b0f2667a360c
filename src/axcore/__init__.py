"""axcore: a plugin framework for training and serving large models on Flax NNX.

Names are imported when they are first used: `import axcore` itself loads neither jax nor flax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from axcore.config import (
        REQUIRED as REQUIRED,
        AxcoreError as AxcoreError,
        Codec as Codec,
        Config as Config,
        ConfigError as ConfigError,
        Configurable as Configurable,
        Modifier as Modifier,
        Where as Where,
        acting as acting,
        at_least as at_least,
        content_hash as content_hash,
        from_json as from_json,
        override as override,
        pipe as pipe,
        register as register,
        register_codec as register_codec,
        select as select,
        tagged as tagged,
        to_json as to_json,
    )
    from axcore.module import (
        DTypes as DTypes,
        Layer as Layer,
        Reduce as Reduce,
        Rngs as Rngs,
        cond as cond,
        current as current,
        custom_jvp as custom_jvp,
        custom_vjp as custom_vjp,
        functional as functional,
        invoke as invoke,
        method as method,
        remat as remat,
        scan as scan,
        stack as stack,
        vmap as vmap,
        while_loop as while_loop,
    )
    from axcore.nn import call as call, stock as stock
    from axcore.parallel import Mesh as Mesh, shard_map as shard_map
    from axcore.plugin import recipe as recipe, target as target, use as use
    from axcore.train import fit as fit

_HOMES = {
    "axcore.config": (
        "REQUIRED AxcoreError Codec Config ConfigError Configurable Modifier Where acting at_least "
        "content_hash from_json override pipe register register_codec select tagged to_json "
    ),
    "axcore.module": (
        "DTypes Layer Reduce Rngs cond current custom_jvp custom_vjp functional invoke method remat scan "
        "stack vmap while_loop "
    ),
    "axcore.nn": "call stock",
    "axcore.parallel": "Mesh shard_map",
    "axcore.plugin": "recipe target use",
    "axcore.train": "fit",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'axcore' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
