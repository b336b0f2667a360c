"""axcore: a plugin framework for training and serving large models on Flax NNX.

Names and submodules are imported when they are first used: `import axcore` itself loads neither jax nor flax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from axcore import aot, config, infer, module, nn, numerics, parallel, plugin, runtime, testing, train
    from axcore.aot import tree
    from axcore.config import (
        REQUIRED,
        AxcoreError,
        Codec,
        Config,
        ConfigError,
        Configurable,
        Modifier,
        Where,
        acting,
        at_least,
        content_hash,
        from_json,
        override,
        pipe,
        register,
        register_codec,
        select,
        tagged,
        to_json,
    )
    from axcore.module import (
        DTypes,
        Layer,
        Reduce,
        Rngs,
        cond,
        current,
        custom_jvp,
        custom_vjp,
        functional,
        invoke,
        method,
        remat,
        scan,
        stack,
        vmap,
        while_loop,
    )
    from axcore.nn import call, stock
    from axcore.parallel import Mesh, shard_map
    from axcore.plugin import recipe, target, use
    from axcore.train import Trainer, fit

__version__ = "0.1.0"

__all__ = [
    "REQUIRED",
    "AxcoreError",
    "Codec",
    "Config",
    "ConfigError",
    "Configurable",
    "DTypes",
    "Layer",
    "Mesh",
    "Modifier",
    "Reduce",
    "Rngs",
    "Trainer",
    "Where",
    "__version__",
    "acting",
    "aot",
    "at_least",
    "call",
    "cond",
    "config",
    "content_hash",
    "current",
    "custom_jvp",
    "custom_vjp",
    "fit",
    "from_json",
    "functional",
    "infer",
    "invoke",
    "method",
    "module",
    "nn",
    "numerics",
    "override",
    "parallel",
    "pipe",
    "plugin",
    "recipe",
    "register",
    "register_codec",
    "remat",
    "runtime",
    "scan",
    "select",
    "shard_map",
    "stack",
    "stock",
    "tagged",
    "target",
    "testing",
    "to_json",
    "train",
    "tree",
    "use",
    "vmap",
    "while_loop",
]

_NAMES = {
    "axcore.aot": "tree",
    "axcore.config": (
        "REQUIRED AxcoreError Codec Config ConfigError Configurable Modifier Where acting at_least content_hash "
        "from_json override pipe register register_codec select tagged to_json"
    ),
    "axcore.module": (
        "DTypes Layer Reduce Rngs cond current custom_jvp custom_vjp functional invoke method remat scan stack "
        "vmap while_loop"
    ),
    "axcore.nn": "call stock",
    "axcore.parallel": "Mesh shard_map",
    "axcore.plugin": "recipe target use",
    "axcore.train": "Trainer fit",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:  # type checkers read the imports above instead

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in __all__:
            from difflib import get_close_matches

            near = get_close_matches(name, __all__, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"module 'axcore' has no attribute {name!r}{hint}")
        if name not in _HOMES:
            return import_module(f"axcore.{name}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value


def __dir__() -> list[str]:
    return __all__
