"""The feature `gemv`: products of one row by a kernel."""

from __future__ import annotations

import axcore as ax
from axcore.nn import Linear
from axcore_gemv.matmul import Gemv


def use_gemv(cfg: ax.Config, where: ax.Where = Linear) -> ax.Config:
    """Computes products of one row in every selected linear map by `Gemv`.

    Args:
        where: selects linear maps. Those inside a mixture of experts have products of their own, and ignore it.
    """
    return ax.select(cfg, where).set(matmul=Gemv())
