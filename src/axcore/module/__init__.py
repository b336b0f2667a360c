"""`Layer`, the invocation context, and transforms of functions that call layers."""

import axcore.preflight  # noqa: F401 - before anything below imports flax
from axcore.module.collections import Collections, Kind, LossSum, Reduce, Summary, labelled
from axcore.module.context import ContextError, Frame, current, root
from axcore.module.layer import BuildError, DTypes, Layer, float_dtype, method
from axcore.module.lifted import cond, custom_jvp, custom_vjp, remat, traced_once, vmap, while_loop
from axcore.module.pure import Functional, Tree, abstract, functional, initializer, invoke
from axcore.module.rngs import Rngs, fold
from axcore.module.transforms import scan, stack
from axcore.module.variables import DecodingState, GradientState, overwrite_with_gradient, to_fm32

__all__ = [
    "BuildError",
    "Collections",
    "ContextError",
    "DTypes",
    "DecodingState",
    "Frame",
    "Functional",
    "GradientState",
    "Kind",
    "Layer",
    "LossSum",
    "Reduce",
    "Rngs",
    "Summary",
    "Tree",
    "abstract",
    "cond",
    "current",
    "custom_jvp",
    "custom_vjp",
    "float_dtype",
    "fold",
    "functional",
    "initializer",
    "invoke",
    "labelled",
    "method",
    "overwrite_with_gradient",
    "remat",
    "root",
    "scan",
    "stack",
    "to_fm32",
    "traced_once",
    "vmap",
    "while_loop",
]


def __dir__() -> list[str]:
    return __all__
