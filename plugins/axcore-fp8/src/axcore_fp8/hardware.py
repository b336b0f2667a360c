"""Which devices multiply FP8 numbers."""

from __future__ import annotations

import re

from axcore.config import ConfigError
from axcore.parallel import target_device

_OLDER_GPUS = re.compile(
    r"\b([VP]100|[KPT]40?|K80|M60|A2|A10G?|A16|A30|A40|A100|A800|GTX|TITAN|Quadro|RTX [23]0\d\d|RTX A\d+"
    r"|MI[12]\d\dX?|MI3[02]\d[AX]?)\b"
)
"""NVIDIA GPUs with a compute capability below 8.9, and AMD GPUs whose FP8 formats are not those of OCP."""


def check_hardware(path: str) -> None:
    """Raises a ConfigError if the target of the current trace has no FP8 products. CPUs emulate them.

    Args:
        path: config path of the layer, for the message.
    """
    platform, kind = target_device()
    if platform == "cpu" or _multiplies(platform, kind):
        return
    raise ConfigError(
        f"{path}: {kind or platform} devices do not multiply FP8 numbers. FP8 requires an NVIDIA GPU with a compute "
        f"capability of at least 8.9 (such as L4, H100, B200) or a TPU7x. Remove the feature fp8, or set "
        f"weight_only=True to round only weights"
    )


def _multiplies(platform: str, kind: str) -> bool:
    if platform in ("gpu", "cuda", "rocm"):
        return _OLDER_GPUS.search(kind) is None
    generation = re.search(r"TPU ?v?(\d+)", kind)
    return platform == "tpu" and generation is not None and int(generation[1]) >= 7
