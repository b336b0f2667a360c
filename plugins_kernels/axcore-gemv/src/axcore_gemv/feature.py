"""The feature `gemv`: products of few rows by a kernel."""

from __future__ import annotations

import axcore as ax
from axcore.nn import Linear
from axcore_gemv.matmul import Gemv


def use_gemv(cfg: ax.Config, max_rows: int = 16, where: ax.Where = Linear) -> ax.Config:
    """Computes products of few rows in every selected linear map by `Gemv`.

    Args:
        max_rows: products of more rows stay with XLA.
        where: selects linear maps. Those inside a mixture of experts have products of their own, and ignore it.
    """
    return ax.select(cfg, where).set(matmul=Gemv(max_rows=max_rows))
