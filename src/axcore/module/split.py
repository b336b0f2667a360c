"""Taking a module apart."""

from __future__ import annotations

from typing import Any

from flax import nnx


def split(module: nnx.Module) -> tuple[Any, Any, Any]:
    """(graph definition, state of the parameters, state of all other Variables)."""
    graphdef, params, *rest = nnx.split(module, nnx.Param, ...)
    return graphdef, params, rest[0]
