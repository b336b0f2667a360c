"""The feature `fp8`."""

from __future__ import annotations

import axcore as ax
from axcore.nn import put_numerics
from axcore_fp8.fp8 import Fp8
from axcore_fp8.training import Scaling


def use_fp8(
    cfg: ax.Config,
    scaling: Scaling = "current",
    amax_history_len: ax.PositiveInt | None = None,
    weight_only: bool = False,
    where: ax.Where | None = None,
) -> ax.Config:
    """FP8 products in the linear maps of all decoder layers except the first and the last.

    See `axcore.nn.put_numerics` for the default selection and what becomes of the stack, and `Fp8.Config` for the other
    options.

    Args:
        where: selects nodes instead, such as `"model.decoder.layers.**"`.
    """
    numerics = Fp8.Config(scaling=scaling, amax_history_len=amax_history_len, weight_only=weight_only)
    return put_numerics(cfg, numerics, where)
