"""Inference: incremental decoding, an engine for many requests, and text generation."""

import axcore.preflight  # noqa: F401 - before anything below imports flax
from axcore.infer.adapters import Adapters
from axcore.infer.beams import Beam, BeamOptions
from axcore.infer.decoding.decoder import Decoder
from axcore.infer.decoding.step import Step
from axcore.infer.disaggregation.handover import Handover, Prefill
from axcore.infer.disaggregation.handover_file import read_handover, write_handover
from axcore.infer.disaggregation.remote_prefill import PrefillServer, RemotePrefill
from axcore.infer.engine import Engine
from axcore.infer.generate import Generator, generate
from axcore.infer.grammar import Grammar, GrammarCompiler, GrammarMatcher
from axcore.infer.requests import FinishReason, Piece, Request, SamplingOptions, TokenLogprob
from axcore.infer.stats import EngineStats
from axcore.infer.streams import Stream

__all__ = [
    "Adapters",
    "Beam",
    "BeamOptions",
    "Decoder",
    "Engine",
    "EngineStats",
    "FinishReason",
    "Generator",
    "Grammar",
    "GrammarCompiler",
    "GrammarMatcher",
    "Handover",
    "Piece",
    "Prefill",
    "PrefillServer",
    "RemotePrefill",
    "Request",
    "SamplingOptions",
    "Step",
    "Stream",
    "TokenLogprob",
    "generate",
    "read_handover",
    "write_handover",
]


def __dir__() -> list[str]:
    return __all__
