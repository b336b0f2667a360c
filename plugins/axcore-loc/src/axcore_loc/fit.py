"""How a number of lines grows with N models and M variants of a slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

HALF_A_LINE = 0.5
"""Less than this, over the whole grid, is no line."""
UNEVEN = 0.1
"""Modules need not cost the same number of lines each; the counts may leave the formula by this part of the largest."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """`lines(n, m) = constant + per_model n + per_slot m + per_pair n m`, by least squares.

    Attributes:
        residual: the largest distance of a count from the formula, in lines; 0 where it is exact.
        order: O(1), O(N), O(M), O(N + M) or O(NM), from the terms that are there; `neither` where the counts are not of
            this form.
    """

    constant: float
    per_model: float
    per_slot: float
    per_pair: float
    residual: float
    order: str


def fit(counts: Mapping[tuple[int, int], float]) -> Fit:
    """The formula that fits counts by (n, m).

    A term is there if it is worth half a line at the largest n and m. It takes two values of n and two of m to tell all
    four terms apart.

    Raises:
        ValueError: the counts cannot tell them apart.
    """
    n, m = (np.array(axis, float) for axis in zip(*counts, strict=True))
    terms = np.stack([np.ones_like(n), n, m, n * m], axis=1)
    if np.linalg.matrix_rank(terms) < terms.shape[1]:
        raise ValueError("to tell O(1), O(N), O(M) and O(NM) apart takes two values of n and two of m, crossed")
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
