"""Sampling on the device: the options of every row as arrays, penalties, masks and log-probabilities."""

from axcore.infer.sampling.acceptance import Verified, verify
from axcore.infer.sampling.counts import Counts
from axcore.infer.sampling.draw import LogProbs, Sampled, log_probabilities, sample
from axcore.infer.sampling.rows import Method, NextToken, SamplingRows
from axcore.infer.sampling.seeds import Seed, seed_words

__all__ = [
    "Counts",
    "LogProbs",
    "Method",
    "NextToken",
    "Sampled",
    "SamplingRows",
    "Seed",
    "Verified",
    "log_probabilities",
    "sample",
    "seed_words",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
