"""Compiles the programs of every bucket before an engine needs them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Array, Float, Int

from axcore.infer.execution.batches import Batch, ModelCall, Packer
from axcore.infer.execution.buckets import Buckets, Shape
from axcore.infer.execution.programs import Programs
from axcore.infer.requests import SamplingOptions
from axcore.infer.sampling import Method
from axcore.infer.sampling.acceptance import NO_DRAFT
from axcore.infer.sampling.rows import PADDING


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmUp:
    """What a warm-up compiles besides the programs of every bucket.

    Attributes:
        methods: the sampling methods.
        prompt_logprobs: whether to compile the programs that score prompts.
        embeddings: whether to compile the programs for embeddings.
        grammars: whether to compile the programs that sample with a grammar, for the method `full`.
        transfers: whether to compile the programs that move decoding state.
    """

    methods: tuple[Method, ...]
    prompt_logprobs: bool = False
    embeddings: bool = False
    grammars: bool = False
    transfers: bool = False


def compile_programs(
    programs: Programs, buckets: Buckets, num_drafts: int, asked: WarmUp, check: Callable[[], None]
) -> None:
    """Compiles the programs of every bucket, by running padding. The state does not change.

    Args:
        programs: the programs.
        buckets: the sizes of their calls.
        num_drafts: the largest number of drafts of a row.
        asked: what else to compile. Its `transfers` are not of these programs.
        check: raises to end the warm-up early; see `Compiler.compile`.
    """
    packer, tables = Packer(programs.decoder, buckets), buckets.pages or (0,)
    models = [functools.partial(programs.logits, call) for call in _model_calls(programs, packer, buckets)]
    others: list[Callable[[], object]] = [functools.partial(programs.count, programs.decoder.batch_size, (), 0)]
    for size, pages in itertools.product(buckets.rows if num_drafts else (), tables):
        drafts = packer.batch({}, Shape(size, 1 + num_drafts), pages)
        models.append(functools.partial(programs.logits_of_drafts, drafts))
    for width, pages in itertools.product(buckets.widths, tables):
        if (asked.prompt_logprobs or asked.embeddings) and _fits(programs, Shape(1, width), pages):
            rows = packer.batch({}, Shape(1, width), pages)
            if asked.prompt_logprobs:
                models.append(functools.partial(_scored, programs, rows, np.zeros((1, width), np.int32)))
            if asked.embeddings:
                others.append(functools.partial(programs.embedded, rows))
    programs.compiler.compile([*models, *others], check)
    # Programs may differ in the shardings of their logits. `Programs.logits` donates earlier ones of the same size, so
    # the last are kept.
    logits = {(found.shape, found.sharding): found for found in (call() for call in models)}
    samplers: list[Callable[[], object]] = []
    for found, method, logprobs in itertools.product(logits.values(), asked.methods, (None, 0)):
        padding = dataclasses.replace(PADDING, options=SamplingOptions(temperature=0.0, logprobs=logprobs))
        tokens = [padding]
        if asked.grammars and method == "full":
            every = np.full(-(-programs.vocab_size // 32), -1, np.int32)
            tokens.append(dataclasses.replace(padding, grammar=every))
        size = math.prod(found.shape[:-1])
        for token in tokens:
            if found.ndim == 2:
                samplers.append(functools.partial(programs.sampled, found, [token] * size, method))
            else:
                no_drafts = np.full((found.shape[0], num_drafts), NO_DRAFT, np.int32)
                samplers.append(functools.partial(programs.verified, found, no_drafts, [token] * size, method))
    programs.compiler.compile(samplers, check)
    for call in (*others, *samplers):
        call()
    programs.warm_up_adapters()


def _model_calls(programs: Programs, packer: Packer, buckets: Buckets) -> Iterator[ModelCall]:
    """A call of every bucket, with padding only. Those that compile for the longest time come first, so that the
    others compile meanwhile."""
    most = buckets.rows[-1]
    for pages in reversed(buckets.pages or (0,)):
        fits = functools.partial(_fits, programs, pages=pages)
        decoding = {size: packer.batch({}, Shape(size, 1), pages) for size in reversed(buckets.rows)}
        for shape in filter(fits, reversed(buckets.mixed)):
            yield ModelCall(decoding[most], packer.batch({}, shape, pages), np.zeros(most, np.int32))
        for shape in filter(fits, reversed(buckets.prompts)):
            yield ModelCall(None, packer.batch({}, shape, pages))
        for rows in decoding.values():
            yield ModelCall(rows)


def _fits(programs: Programs, shape: Shape, pages: int) -> bool:
    """Whether a row of a prompt can have page tables of this size."""
    paging = programs.decoder.paging
    return paging is None or pages >= paging.pages_for(shape.width)


def _scored(programs: Programs, rows: Batch, targets: Int[np.ndarray, "1 width"]) -> Float[Array, "1 vocab"]:
    return programs.scored(rows, targets)[0]
