"""Inference: incremental decoding and text generation."""

import axcore.preflight  # noqa: F401 - before anything below imports flax
from axcore.infer.decoder import Decoder, Step
from axcore.infer.generate import Generator, generate

__all__ = ["Decoder", "Generator", "Step", "generate"]


def __dir__() -> list[str]:
    return __all__
