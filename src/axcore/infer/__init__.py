"""Inference: incremental decoding and text generation."""

import axcore.preflight  # noqa: F401 - before anything below imports flax
from axcore.infer.decoder import Decoder, Step
from axcore.infer.generate import Generator, generate
from axcore.infer.requests import FinishReason, Piece, Request, SamplingOptions, TokenLogprob

__all__ = [
    "Decoder",
    "FinishReason",
    "Generator",
    "Piece",
    "Request",
    "SamplingOptions",
    "Step",
    "TokenLogprob",
    "generate",
]


def __dir__() -> list[str]:
    return __all__
