"""Which GPUs have which kernels."""

_BEFORE_HOPPER = ("V100", "T4", "A100", "A800", "A10", "A30", "A40", "L4", "RTX", "GeForce", "TITAN")
"""Substrings of the names of GPUs with a compute capability below 9.0. On them, cuDNN has no packed rows, no head_dim
above 128 and no FP8 attention."""


def is_before_hopper(device_kind: str) -> bool:
    """Whether a GPU is older than Hopper. False for an unknown one."""
    return any(name in device_kind for name in _BEFORE_HOPPER)
