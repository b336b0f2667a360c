"""Ranges of numbers, declared in the annotation of a field: `eps: PositiveFloat = 1e-5`."""

from __future__ import annotations

import dataclasses
import operator
import struct
from typing import Annotated

_BOUNDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """The range of a number. `Annotated[float, Range(at_least=0, below=1)]` is the annotation of a field.

    NaN and infinities are outside of every range. Models compute in float32, so a float must be in the range after
    rounding to float32, too. An integer must fit into 64 bits. `Range()` declares that every other number is valid.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return self._holds(value) and self._holds(_stored(value))

    def _holds(self, value: float) -> bool:
        bounds = {name: bound for name in _BOUNDS if (bound := getattr(self, name)) is not None}
        return abs(value) < float("inf") and all(_BOUNDS[name](value, bound) for name, bound in bounds.items())

    def required(self, value: float) -> str:
        """What a value outside of the range is required to be, for messages: "at least 0 and below 1"."""
        bounds = [f"{name.replace('_', ' ')} {bound}" for name in _BOUNDS if (bound := getattr(self, name)) is not None]
        if isinstance(value, int) and self._holds(value):
            return " and ".join([*bounds, "of at most 64 bits"])
        if isinstance(value, float) and not abs(_stored(value)) < float("inf"):
            bounds.insert(0, "finite")
        return " and ".join(bounds) + (" after rounding to float32" if self._holds(value) else "")


def _stored(value: float) -> float:
    """The number as 64-bit integers and float32 hold it; infinity if they cannot."""
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else float("inf")
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return float("inf")


PositiveInt = Annotated[int, Range(at_least=1)]
NonNegativeInt = Annotated[int, Range(at_least=0)]
AnyInt = Annotated[int, Range()]
Seed = Annotated[int, Range(at_least=0, below=2**32)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(at_least=0)]
FiniteFloat = Annotated[float, Range()]
Fraction = Annotated[float, Range(at_least=0, below=1)]
"""A share of a whole that is less than the whole, such as a dropout rate."""
