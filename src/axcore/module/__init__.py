"""Layer, the invocation context, and the transforms that carry it."""

import axcore.module.codecs  # noqa: F401 - configs may hold number types and partition specs from here on
from axcore.module.context import Collections, ContextError, Frame, current, labelled
from axcore.module.layer import BuildError, DTypes, Layer, method
from axcore.module.pure import Functional, Tree, abstract, functional, initializer, invoke
from axcore.module.rngs import Rngs, fold
from axcore.module.transforms import scan, stack

__all__ = [
    "BuildError",
    "Collections",
    "ContextError",
    "DTypes",
    "Frame",
    "Functional",
    "Layer",
    "Rngs",
    "Tree",
    "abstract",
    "current",
    "fold",
    "functional",
    "initializer",
    "invoke",
    "labelled",
    "method",
    "scan",
    "stack",
]
