"""Running single equations of a jaxpr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Equation = Any  # Any: private to jax


def bind(eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of an equation, as a list."""
    found = eqn.primitive.get_bind_params(eqn.params)
    functions, params = found if isinstance(found, tuple) else ((), found)
    with eqn.ctx.manager:
        outputs = eqn.primitive.bind(*functions, *inputs, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]
