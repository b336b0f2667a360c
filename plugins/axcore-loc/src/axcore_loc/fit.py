"""How a number of lines grows with N models and M variants of a slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

HALF_A_LINE = 0.5
"""Smaller contributions over the whole grid count as zero."""
UNEVEN = 0.1
"""Allowed deviation of counts from the formula, relative to the largest, since modules may differ in cost."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """`lines(n, m) = constant + per_model n + per_slot m + per_pair n m`, by least squares.

    Attributes:
        residual: the largest deviation of a count from the formula, in lines.
        order: O(1), O(N), O(M), O(N + M) or O(NM), from the nonzero terms; `neither` if the counts do not fit the
            formula.
    """

    constant: float
    per_model: float
    per_slot: float
    per_pair: float
    residual: float
    order: str


def fit(counts: Mapping[tuple[int, int], float]) -> Fit:
    """The formula that fits counts by (n, m).

    A term counts as nonzero if it contributes at least half a line at the largest n and m.

    Raises:
        ValueError: the counts do not determine the terms, which requires two values of n crossed with two of m.
    """
    n, m = (np.array(axis, float) for axis in zip(*counts, strict=True))
    terms = np.stack([np.ones_like(n), n, m, n * m], axis=1)
    if np.linalg.matrix_rank(terms) < terms.shape[1]:
        raise ValueError("distinguishing O(1), O(N), O(M) and O(NM) requires two values of n crossed with two of m")
    lines = np.array(list(counts.values()), float)
    factors = np.linalg.lstsq(terms, lines, rcond=None)[0]
    residual = float(np.abs(terms @ factors - lines).max())
    there = np.abs(factors) * terms.max(axis=0) >= HALF_A_LINE
    exact = residual < max(HALF_A_LINE, UNEVEN * lines.max())
    order = _order(*there[1:]) if exact else "neither"
    constant, per_model, per_slot, per_pair = (round(float(each), 6) + 0.0 for each in factors)
    return Fit(constant, per_model, per_slot, per_pair, round(residual, 6), order)


def _order(per_model: bool, per_slot: bool, per_pair: bool) -> str:
    if per_pair:
        return "O(NM)"
    if per_model and per_slot:
        return "O(N + M)"
    return "O(N)" if per_model else "O(M)" if per_slot else "O(1)"
