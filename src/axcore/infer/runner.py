"""Runs the plans of a scheduler on the device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from axcore.infer.buckets import Buckets, Shape, bucket
from axcore.infer.programs import Batch, ModelCall, Programs
from axcore.infer.requests import SamplingOptions
from axcore.infer.sampling import Method, NextToken, Sampled, SamplingRows, Verified
from axcore.infer.sampling.acceptance import NO_DRAFT
from axcore.infer.sampling.rows import PADDING
from axcore.infer.sequences import Chunk, Plan
from axcore.infer.step_in_flight import SampledToken, SamplerCall, StepInFlight
from axcore.infer.transfers import Transfers

Seed = tuple[int, int]
"""The words of a seed; see `seed_words`."""

type Mask = Int32[np.ndarray, " words"]
"""The tokens that a sequence may sample, as `NextToken.grammar`."""

Masks = Callable[[tuple[int, ...]], list[Mask]]
"""Returns the mask of the next token, and that after each of some drafts."""


class Part(NamedTuple):
    """Tokens of a chunk that are a row of a call: all of them, or some of a prompt.

    Attributes:
        chunk: the chunk.
        offset: the number of its tokens before those of the part.
        length: the number of tokens.
    """

    chunk: Chunk
    offset: int
    length: int

    @property
    def is_last(self) -> bool:
        """Whether the next token of the sequence is sampled after this part."""
        return self.chunk.is_last and self.offset + self.length == self.chunk.count


class Runner:
    """Runs steps: packs chunks into rows, and calls the programs.

    Args:
        programs: the programs.
        transfers: moves decoding state out of the device and back.
        buckets: the sizes to which rows are padded.
        eos_ids: the tokens that `min_tokens` excludes.
        num_drafts: the largest number of drafts of a row.
    """

    def __init__(
        self,
        programs: Programs,
        transfers: Transfers,
        buckets: Buckets,
        eos_ids: Collection[int],
        num_drafts: int = 0,
    ):
        self.transfers = transfers
        self._programs, self._buckets, self._eos_ids, self._num_drafts = programs, buckets, eos_ids, num_drafts
        self._decoder = programs.decoder
        self._has_all_slots = self._decoder.paging is None
        self._counted: dict[int, int] = {}  # the sequence whose tokens are counted, by slot

    def start(self, plan: Plan, seeds: Mapping[int, Seed], masks: Mapping[int, Masks]) -> StepInFlight:
        """Starts a step, without waiting for the device.

        Args:
            plan: the newest plan of the scheduler.
            seeds: the seed of each sequence, by id.
            masks: the tokens that each sequence with a grammar may sample, by id. They are computed while the device
                runs the model.
        """
        self.transfers.start(plan.transfers, plan.number)
        calls, scores, states = [], [], []
        for chunk in plan.chunks:
            if chunk.is_last and chunk.sequence.request.pooling is None:
                self._count(chunk)
        prompts = [chunk for chunk in plan.prefill if not _is_alone(chunk)]
        decode = plan.decode
        if any(chunk.num_drafts for chunk in decode):
            calls.append(self._verified(decode, seeds, masks))
            decode = ()
        while decode or prompts:  # usually one call
            number, rows, logits = self._call(decode, prompts)
            if rows:
                calls.append(self._sampled(rows, logits, seeds, masks))
            decode, prompts = (), prompts[number:]
        for chunk in filter(_is_alone, plan.prefill):
            batch = self._packed({0: _whole(chunk)}, Shape(1, bucket(self._buckets.widths, chunk.count)), 1)
            if chunk.sequence.request.pooling is not None:
                states.append((chunk, self._programs.embedded(batch)))
                continue
            logits, found = self._programs.scored(batch, self._targets(chunk, batch.ids.shape[1]))
            scores.append((chunk, found))
            if chunk.is_last:
                calls.append(self._sampled({0: chunk}, logits, seeds, masks))
        for array in jax.tree.leaves([found for _, found in scores] + [found for _, found in states]):
            array.copy_to_host_async()
        return StepInFlight(plan, calls, scores, states)

    def read(self, flight: StepInFlight) -> dict[int, list[SampledToken]]:
        """Waits for a step and its copies to the host. Returns the sampled tokens; see `StepInFlight.tokens`."""
        self.transfers.finish(flight.plan.number)
        return flight.tokens()

    def warm_up(
        self,
        methods: Iterable[Method],
        *,
        prompt_logprobs: bool,
        embeddings: bool,
        grammars: bool,
        transfers: bool,
        check: Callable[[], None],
    ) -> None:
        """Compiles the programs of every bucket, by running padding. The state does not change.

        Args:
            methods: the sampling methods to compile.
            prompt_logprobs: whether to compile the programs that score prompts.
            embeddings: whether to compile the programs for embeddings.
            grammars: whether to compile the programs that sample with a grammar, for the method `full`.
            transfers: whether to compile the programs that move decoding state.
            check: raises to end the warm-up early; see `Compiler.compile`.
        """
        models = [functools.partial(self._programs.logits, call) for call in self._model_calls()]
        others: list[Callable[[], object]] = [functools.partial(self._programs.count, self._decoder.batch_size, (), 0)]
        tables = self._buckets.pages or (0,)
        for size, pages in itertools.product(self._buckets.rows if self._num_drafts else (), tables):
            models.append(functools.partial(self._logits_of_drafts, {}, size, pages))
        for width, pages in itertools.product(self._buckets.widths, tables):
            if (prompt_logprobs or embeddings) and self._fits(Shape(1, width), pages):
                rows = self._packed({}, Shape(1, width), pages)
                if prompt_logprobs:
                    models.append(functools.partial(self._scored, rows, np.zeros((1, width), np.int32)))
                if embeddings:
                    others.append(functools.partial(self._programs.embedded, rows))
        self._programs.compiler.compile([*models, *others], check)
        # Programs may differ in the shardings of their logits.
        logits = {(found.shape, found.sharding): found for found in (call() for call in models)}
        samplers: list[Callable[[], object]] = []
        for found, method, asked in itertools.product(logits.values(), methods, (None, 0)):
            padding = dataclasses.replace(PADDING, options=SamplingOptions(temperature=0.0, logprobs=asked))
            tokens = [padding]
            if grammars and method == "full":
                every = np.full(-(-self._programs.vocab_size // 32), -1, np.int32)
                tokens.append(dataclasses.replace(padding, grammar=every))
            size = math.prod(found.shape[:-1])
            for token in tokens:
                if found.ndim == 2:
                    samplers.append(functools.partial(self._sample, found, [token] * size, method))
                else:
                    drafts = np.full((found.shape[0], self._num_drafts), NO_DRAFT, np.int32)
                    samplers.append(functools.partial(self._verify, found, drafts, [token] * size, method))
        self._programs.compiler.compile(samplers, check)
        for call in (*others, *samplers):
            call()
        self._programs.warm_up_adapters()
        if transfers:
            self.transfers.programs.warm_up()

    def _model_calls(self) -> Iterator[ModelCall]:
        """A call of every bucket, with padding only. Those that compile for the longest time come first, so that the
        others compile meanwhile."""
        buckets, most = self._buckets, self._buckets.rows[-1]
        for pages in reversed(buckets.pages or (0,)):
            fits = functools.partial(self._fits, pages=pages)
            decoding = {size: self._packed({}, Shape(size, 1), pages) for size in reversed(buckets.rows)}
            for shape in filter(fits, reversed(buckets.mixed)):
                prompts, at = self._packed({}, shape, pages), np.zeros(most, np.int32)
                yield ModelCall(decoding[most], prompts, at, self._has_all_slots)
            for shape in filter(fits, reversed(buckets.prompts)):
                yield ModelCall(None, self._packed({}, shape, pages))
            for rows in decoding.values():
                yield ModelCall(rows, all_slots=self._has_all_slots)

    def _scored(self, rows: Batch, targets: Int[np.ndarray, "1 width"]) -> Float[Array, "1 vocab"]:
        return self._programs.scored(rows, targets)[0]

    def _fits(self, shape: Shape, pages: int) -> bool:
        """Whether a row of a prompt can have page tables of this size."""
        return self._decoder.paging is None or pages >= self._decoder.paging.pages_for(shape.width)

    def _call(
        self, decode: Sequence[Chunk], prompts: Sequence[Chunk]
    ) -> tuple[int, dict[int, Chunk], Float[Array, "rows vocab"]]:
        """Runs the model on rows that decode and on the first of some chunks of prompts, as many as fit into one call.

        Returns:
            The number of these chunks, the row of the logits of each chunk that samples a token, and the logits.
        """
        if not prompts:
            rows = {self._row(row, chunk): chunk for row, chunk in enumerate(decode)}
            size = bucket(self._buckets.rows, len(rows))
            batch = self._packed({row: _whole(chunk) for row, chunk in rows.items()}, Shape(size, 1), 1)
            return 0, rows, self._programs.logits(ModelCall(batch, all_slots=self._has_all_slots))
        number, shape = self._buckets.fit([chunk.count for chunk in prompts], mixed=bool(decode))
        parts = dict(enumerate(itertools.chain.from_iterable(_parts(chunk, shape.width) for chunk in prompts[:number])))
        last = {row: part.chunk for row, part in parts.items() if part.is_last}
        if not decode:
            return number, last, self._programs.logits(ModelCall(None, self._packed(parts, shape, 1)))
        most = self._buckets.rows[-1]
        rows, at = {}, np.zeros(most, np.int32)
        for chunk, found in itertools.chain(((each, None) for each in decode), ((c, r) for r, c in last.items())):
            row = self._row(len(rows), chunk)
            rows[row], at[row] = chunk, row if found is None else most + found
        decoding = {row: _whole(chunk) for row, chunk in rows.items() if at[row] < most}
        pages = max(len(chunk.sequence.pages) for chunk in (*decode, *prompts[:number]))
        prefill = self._packed(parts, shape, pages)
        pages = pages if prefill.pages is None else prefill.pages.shape[1]
        batch = self._packed(decoding, Shape(most, 1), pages)
        return number, rows, self._programs.logits(ModelCall(batch, prefill, at, self._has_all_slots))

    def _logits_of_drafts(
        self, rows: Mapping[int, Chunk], size: int, pages: int = 1
    ) -> Float[Array, "rows width vocab"]:
        parts = {row: _whole(chunk) for row, chunk in rows.items()}
        batch = self._packed(parts, Shape(size, 1 + self._num_drafts), pages)
        return self._programs.logits_of_drafts(batch, all_slots=self._has_all_slots)

    def _row(self, row: int, chunk: Chunk) -> int:
        """The row of a chunk that decodes: without pages its slot, because caches of all slots are read in place."""
        return _slot(chunk) if self._has_all_slots else row

    def _targets(self, chunk: Chunk, width: int) -> Int[np.ndarray, "1 width"]:
        """The token after each token of a chunk."""
        targets = np.zeros((1, width), np.int32)
        after = chunk.sequence.tokens[chunk.start + 1 : chunk.start + 1 + chunk.count]
        targets[0, : len(after)] = after
        return targets

    def _packed(self, rows: Mapping[int, Part], shape: Shape, pages: int) -> Batch:
        """The rows of a call, with page tables of the bucket of at least `pages`."""
        ids, ints, table = np.zeros(shape, np.int32), np.zeros((shape.rows, 5), np.int32), None
        ints[:, 2:] = self._decoder.batch_size, 0, -1  # a slot that is out of range, and no adapter
        if (paging := self._decoder.paging) is not None:
            longest = max((len(part.chunk.sequence.pages) for part in rows.values()), default=0)
            pages = bucket(self._buckets.pages, max(pages, longest, paging.pages_for(shape.width)))
            table = np.full((shape.rows, pages), paging.num_pages, np.int32)  # out of range
        for row, (chunk, offset, length) in rows.items():
            tokens, owned = chunk.ids[offset : offset + length], chunk.sequence.pages
            ids[row, : len(tokens)] = tokens
            adapter = -1 if chunk.sequence.adapter is None else chunk.sequence.adapter.slot
            ints[row] = chunk.start + offset, length, _slot(chunk), int(not chunk.ids), adapter
            if table is not None:
                table[row, : len(owned)] = owned
        return Batch(ids, ints, table)

    def _sampled(
        self,
        rows: Mapping[int, Chunk],
        logits: Float[Array, "rows vocab"],
        seeds: Mapping[int, Seed],
        masks: Mapping[int, Masks],
    ) -> SamplerCall:
        tokens = [PADDING] * logits.shape[0]
        for row, chunk in rows.items():
            mask = masks[chunk.sequence.id](())[0] if chunk.sequence.id in masks else None
            tokens[row] = _next_token(chunk, chunk.start + chunk.count, seeds, mask)
        return SamplerCall(rows, _fetched(self._sample(logits, tokens, None)))

    def _verified(self, decode: Sequence[Chunk], seeds: Mapping[int, Seed], masks: Mapping[int, Masks]) -> SamplerCall:
        """Runs the model on rows that decode, of which some have drafts, and samples their next tokens."""
        rows = {self._row(row, chunk): chunk for row, chunk in enumerate(decode)}
        size, width = bucket(self._buckets.rows, len(rows)), 1 + self._num_drafts
        logits = self._logits_of_drafts(rows, size)
        tokens, drafts = [PADDING] * (size * width), np.full((size, width - 1), NO_DRAFT, np.int32)
        for row, chunk in rows.items():
            of_row = chunk.ids[1:]
            drafts[row, : len(of_row)] = of_row
            allowed = masks[chunk.sequence.id](of_row) if chunk.sequence.id in masks else [None] * chunk.count
            for at, mask in enumerate(allowed):
                tokens[row * width + at] = _next_token(chunk, chunk.start + 1 + at, seeds, mask)
        return SamplerCall(rows, _fetched(self._verify(logits, drafts, tokens, None)))

    def _sample(
        self, logits: Float[Array, "rows vocab"], tokens: Sequence[NextToken], method: Method | None
    ) -> Sampled:
        slots = np.array([token.slot for token in tokens], np.int32)
        return self._programs.sampled(logits, slots, self._sampling(tokens, method))

    def _verify(
        self,
        logits: Float[Array, "rows width vocab"],
        drafts: Int[np.ndarray, "rows drafts"],
        tokens: Sequence[NextToken],
        method: Method | None,
    ) -> Verified:
        slots = np.array([token.slot for token in tokens[:: logits.shape[1]]], np.int32)
        return self._programs.verified(logits, drafts, slots, self._sampling(tokens, method))

    def _sampling(self, tokens: Sequence[NextToken], method: Method | None) -> SamplingRows:
        return SamplingRows.of(tokens, vocab_size=self._programs.vocab_size, eos_ids=self._eos_ids, method=method)

    def _count(self, chunk: Chunk) -> None:
        """Counts the tokens of a row that starts to sample, if it has penalties."""
        sequence, options = chunk.sequence, chunk.sequence.request.options
        if self._counted.get(_slot(chunk)) == sequence.id:
            return
        # A sequence that was preempted may come back to an earlier slot, whose counts lack its newest tokens.
        self._counted = {slot: id for slot, id in self._counted.items() if id != sequence.id}
        self._counted[_slot(chunk)] = sequence.id
        if options.frequency_penalty or options.presence_penalty or options.repetition_penalty != 1:
            self._programs.count(_slot(chunk), sequence.tokens, len(sequence.request.ids))


def _is_alone(chunk: Chunk) -> bool:
    """Whether a chunk is computed by a call of its own, since more than the logits of its last token is asked for."""
    request = chunk.sequence.request
    return request.pooling is not None or request.options.prompt_logprobs


def _whole(chunk: Chunk) -> Part:
    return Part(chunk, 0, chunk.count)


def _parts(chunk: Chunk, width: int) -> Iterator[Part]:
    """The rows of at most `width` tokens of a chunk."""
    return (Part(chunk, offset, min(width, chunk.count - offset)) for offset in range(0, chunk.count, width))


def _slot(chunk: Chunk) -> int:
    assert chunk.sequence.slot is not None
    return chunk.sequence.slot


def _next_token(chunk: Chunk, position: int, seeds: Mapping[int, Seed], mask: Mask | None) -> NextToken:
    """The token at a position after a chunk or one of its drafts."""
    sequence, request = chunk.sequence, chunk.sequence.request
    num_output = position - len(request.ids)
    return NextToken(request.options, seeds[sequence.id], position, num_output, _slot(chunk), mask)


def _fetched[T](found: T) -> T:
    """Starts to copy arrays to the host."""
    for array in jax.tree.leaves(found):
        array.copy_to_host_async()
    return found
