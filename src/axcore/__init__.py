"""axcore: a plugin framework for training and serving large models on Flax NNX.

Names and submodules are imported when they are first used: `import axcore` itself loads neither jax nor flax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Type checkers follow only imports; `X as X` marks a name as public. `_NAMES` repeats them, since this block is not
    # executed.
    from axcore import (
        aot as aot,
        config as config,
        infer as infer,
        module as module,
        nn as nn,
        numerics as numerics,
        parallel as parallel,
        plugin as plugin,
        runtime as runtime,
        testing as testing,
        train as train,
    )
    from axcore.aot import tree as tree
    from axcore.config import (
        REQUIRED as REQUIRED,
        AnyInt as AnyInt,
        AxcoreError as AxcoreError,
        Codec as Codec,
        Config as Config,
        ConfigError as ConfigError,
        Configurable as Configurable,
        FiniteFloat as FiniteFloat,
        Fraction as Fraction,
        Modifier as Modifier,
        NonNegativeFloat as NonNegativeFloat,
        NonNegativeInt as NonNegativeInt,
        PositiveFloat as PositiveFloat,
        PositiveInt as PositiveInt,
        Range as Range,
        Seed as Seed,
        Where as Where,
        acting as acting,
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
    from axcore.train import Trainer as Trainer, fit as fit

__version__ = "0.1.0"

_SUBMODULES = "aot config infer module nn numerics parallel plugin runtime testing train"
_NAMES = {
    "axcore.aot": "tree",
    "axcore.config": (
        "REQUIRED AnyInt AxcoreError Codec Config ConfigError Configurable FiniteFloat Fraction Modifier "
        "NonNegativeFloat NonNegativeInt PositiveFloat PositiveInt Range Seed Where acting content_hash from_json "
        "override pipe register register_codec select tagged to_json"
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

__all__ = sorted(["__version__", *_SUBMODULES.split(), *_HOMES])

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
