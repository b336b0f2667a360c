"""Runs the plans of a scheduler on the device."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from axcore.infer.programs import Batch, Buckets, Programs, bucket
from axcore.infer.requests import SamplingOptions, TokenLogprob
from axcore.infer.sampling import LogProbs, Method, NextToken, Sampled, SamplingRows, Verified
from axcore.infer.sampling.acceptance import NO_DRAFT
from axcore.infer.sampling.rows import PADDING
from axcore.infer.sequences import Chunk, Plan

Seed = tuple[int, int]
"""The words of a seed; see `seed_words`."""

type Mask = Int32[np.ndarray, " words"]
"""The tokens that a sequence may sample, as `NextToken.grammar`."""

Masks = Callable[[tuple[int, ...]], list[Mask]]
"""Returns the mask of the next token, and that after each of some drafts."""


class SampledToken(NamedTuple):
    """A sampled token, and its log-probability if the request asks for it."""

    token: int
    logprob: TokenLogprob | None


class SamplerCall(NamedTuple):
    """A call of the sampler: the chunk of each row that is no padding, and the result, which is on the device."""

    rows: Mapping[int, Chunk]
    found: Sampled | Verified


@dataclasses.dataclass(frozen=True)
class StepInFlight:
    """A step that was started, and whose results were not read yet."""

    plan: Plan
    calls: list[SamplerCall]
    scores: list[tuple[Chunk, LogProbs]]
    """The log-probabilities of the token after each token of a chunk, for requests that ask for those of the prompt."""
    states: list[tuple[Chunk, Float[Array, "2 embed"]]]
    """What poolings need of the hidden states of a chunk, for requests that ask for an embedding."""


class Runner:
    """Runs steps: packs chunks into rows, calls the programs, and reads what they sampled.

    Args:
        programs: the programs.
        buckets: the sizes to which rows are padded.
        eos_ids: the tokens that `min_tokens` excludes.
        num_drafts: the largest number of drafts of a row.
    """

    def __init__(self, programs: Programs, buckets: Buckets, eos_ids: Collection[int], num_drafts: int = 0):
        self._programs, self._buckets, self._eos_ids, self._num_drafts = programs, buckets, eos_ids, num_drafts
        self._decoder = programs.decoder
        self._is_paged = self._decoder.paging is not None
        self._counted: dict[int, int] = {}  # the sequence whose tokens are counted, by slot

    def start(self, plan: Plan, seeds: Mapping[int, Seed], masks: Mapping[int, Masks]) -> StepInFlight:
        """Starts a step, without waiting for the device.

        Args:
            plan: the newest plan of the scheduler.
            seeds: the seed of each sequence, by id.
            masks: the tokens that each sequence with a grammar may sample, by id. They are computed while the device
                runs the model.
        """
        calls, scores, states = [], [], []
        for chunk in plan.chunks:
            if chunk.is_last:
                self._count(chunk)
        if plan.decode:
            rows = {self._row(row, chunk): chunk for row, chunk in enumerate(plan.decode)}
            size = bucket(self._buckets.rows, len(rows))
            if any(chunk.num_drafts for chunk in plan.decode):
                calls.append(self._verified(rows, self._logits_of_drafts(rows, size), seeds, masks))
            else:
                calls.append(self._sampled(rows, self._logits_of_decoding(rows, size), seeds, masks))
        for chunk in plan.prefill:
            if chunk.start == 0:
                assert chunk.sequence.slot is not None
                self._programs.erase(chunk.sequence.slot)
            width = bucket(self._buckets.widths, chunk.count)
            if chunk.sequence.request.pooling is not None:
                states.append((chunk, self._programs.embedded(self._packed({0: chunk}, 1, width, 1))))
                continue
            if chunk.sequence.request.options.prompt_logprobs:
                logits, found = self._scored(chunk, width)
                scores.append((chunk, found))
            else:
                logits = self._logits_of_prompt({0: chunk}, width)
            if chunk.is_last:
                calls.append(self._sampled({0: chunk}, logits, seeds, masks))
        for array in jax.tree.leaves([found for _, found in scores] + [found for _, found in states]):
            array.copy_to_host_async()
        return StepInFlight(plan, calls, scores, states)

    def read(self, flight: StepInFlight) -> dict[int, list[SampledToken]]:
        """Waits for a step. Returns what each sequence sampled, by id: the accepted drafts and the token after them. It
        is nothing if every token is excluded or the logits are not finite, and an arbitrary token if the sequence has
        no output."""
        sampled = {chunk.sequence.id: [SampledToken(0, None)] for chunk, _ in flight.states if chunk.is_last}
        for rows, on_device in flight.calls:
            found: Sampled | Verified = jax.device_get(on_device)
            if isinstance(found, Sampled):
                found = Verified(found, found.valid.astype(np.int32))
            tokens, logprobs = found.sampled.tokens, found.sampled.logprobs
            width = len(tokens) // len(found.num_tokens)
            for row, chunk in rows.items():
                count = chunk.sequence.request.options.logprobs
                new = sampled[chunk.sequence.id] = []
                for at in range(row * width, row * width + int(found.num_tokens[row])):
                    token = int(tokens[at])
                    logprob = None
                    if count is not None and logprobs is not None:
                        logprob = _logprob(logprobs, at, token, count)
                    new.append(SampledToken(token, logprob))
        return sampled

    def read_scores(self, flight: StepInFlight) -> Iterator[tuple[int, int, TokenLogprob]]:
        """Waits for a step. Yields (id of the sequence, position, log-probability) of each token of a prompt that
        follows a token of the step."""
        for chunk, on_device in flight.scores:
            found: LogProbs = jax.device_get(on_device)
            sequence = chunk.sequence
            ids, count = sequence.request.ids, sequence.request.options.logprobs or 0
            for row, position in enumerate(range(chunk.start + 1, min(chunk.start + chunk.count + 1, len(ids)))):
                yield sequence.id, position, _logprob(found, row, ids[position], count)

    def read_states(self, flight: StepInFlight) -> Iterator[tuple[Chunk, Float[np.ndarray, "2 embed"]]]:
        """Waits for a step. Yields the hidden states of each chunk of a request that asks for an embedding."""
        for chunk, on_device in flight.states:
            yield chunk, jax.device_get(on_device)

    def warm_up(self, methods: Iterable[Method], *, prompt_logprobs: bool, embeddings: bool, grammars: bool) -> None:
        """Compiles the programs of every bucket, by running padding. The state does not change.

        Args:
            methods: the sampling methods to compile.
            prompt_logprobs: whether to compile the programs that score prompts.
            embeddings: whether to compile the programs for embeddings.
            grammars: whether to compile the programs that sample with a grammar, for the method `full`.
        """
        logits: dict[int, Float[Array, "rows vocab"]] = {}
        of_drafts: dict[int, Float[Array, "rows width vocab"]] = {}
        tables, paging = self._buckets.pages or (0,), self._decoder.paging
        for size, pages in itertools.product(self._buckets.rows, tables):
            logits[size] = self._logits_of_decoding({}, size, pages)
            if self._num_drafts:
                of_drafts[size] = self._logits_of_drafts({}, size, pages)
        for width, pages in itertools.product(self._buckets.widths, tables):
            if paging is None or pages >= paging.pages_for(width):
                logits[1] = self._logits_of_prompt({}, width, pages)
                if prompt_logprobs:
                    self._programs.scored(self._packed({}, 1, width, pages), np.zeros((1, width), np.int32))
                if embeddings:
                    self._programs.embedded(self._packed({}, 1, width, pages))
        for (size, of_size), method, asked in itertools.product(logits.items(), methods, (None, 0)):
            padding = dataclasses.replace(PADDING, options=SamplingOptions(temperature=0.0, logprobs=asked))
            tokens = [padding]
            if grammars and method == "full":
                every = np.full(-(-self._programs.vocab_size // 32), -1, np.int32)
                tokens.append(dataclasses.replace(padding, grammar=every))
            for token in tokens:
                self._sample(of_size, [token] * size, method)
                if size in of_drafts:
                    drafts = np.full((size, self._num_drafts), NO_DRAFT, np.int32)
                    self._verify(of_drafts[size], drafts, [token] * (size * (1 + self._num_drafts)), method)
        self._programs.count(self._decoder.batch_size, (), 0)
        self._programs.erase(self._decoder.batch_size)

    def _row(self, row: int, chunk: Chunk) -> int:
        """The row of a chunk that decodes: without pages its slot, because caches of all slots are read in place."""
        slot = chunk.sequence.slot
        assert slot is not None
        return row if self._is_paged else slot

    def _logits_of_decoding(self, rows: Mapping[int, Chunk], size: int, pages: int = 1) -> Float[Array, "rows vocab"]:
        return self._programs.logits(self._packed(rows, size, 1, pages), "decode", whole=not self._is_paged)

    def _logits_of_drafts(
        self, rows: Mapping[int, Chunk], size: int, pages: int = 1
    ) -> Float[Array, "rows width vocab"]:
        packed = self._packed(rows, size, 1 + self._num_drafts, pages)
        return self._programs.logits_of_drafts(packed, whole=not self._is_paged)

    def _logits_of_prompt(self, rows: Mapping[int, Chunk], width: int, pages: int = 1) -> Float[Array, "1 vocab"]:
        return self._programs.logits(self._packed(rows, 1, width, pages), "prefill")

    def _scored(self, chunk: Chunk, width: int) -> tuple[Float[Array, "1 vocab"], LogProbs]:
        targets = np.zeros((1, width), np.int32)
        after = chunk.sequence.tokens[chunk.start + 1 : chunk.start + 1 + chunk.count]
        targets[0, : len(after)] = after
        return self._programs.scored(self._packed({0: chunk}, 1, width, 1), targets)

    def _packed(self, rows: Mapping[int, Chunk], size: int, width: int, pages: int) -> Batch:
        """The chunks in `size` rows of `width` tokens, with page tables of the bucket of at least `pages`."""
        ids, ints, table = np.zeros((size, width), np.int32), np.zeros((size, 4), np.int32), None
        ints[:, 2] = self._decoder.batch_size  # out of range
        if (paging := self._decoder.paging) is not None:
            longest = max((len(chunk.sequence.pages) for chunk in rows.values()), default=0)
            pages = bucket(self._buckets.pages, max(pages, longest))
            table = np.full((size, pages), paging.num_pages, np.int32)  # out of range
        for row, chunk in rows.items():
            sequence = chunk.sequence
            ids[row, : len(chunk.ids)] = chunk.ids
            assert sequence.slot is not None
            ints[row] = chunk.start, chunk.count, sequence.slot, int(not chunk.ids)
            if table is not None:
                table[row, : len(sequence.pages)] = sequence.pages
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

    def _verified(
        self,
        rows: Mapping[int, Chunk],
        logits: Float[Array, "rows width vocab"],
        seeds: Mapping[int, Seed],
        masks: Mapping[int, Masks],
    ) -> SamplerCall:
        size, width, _ = logits.shape
        tokens = [PADDING] * (size * width)
        drafts = np.full((size, width - 1), NO_DRAFT, np.int32)
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
        assert sequence.slot is not None
        if self._counted.get(sequence.slot) == sequence.id:
            return
        self._counted[sequence.slot] = sequence.id
        if options.frequency_penalty or options.presence_penalty or options.repetition_penalty != 1:
            self._programs.count(sequence.slot, sequence.tokens, len(sequence.request.ids))


def _next_token(chunk: Chunk, position: int, seeds: Mapping[int, Seed], mask: Mask | None) -> NextToken:
    """The token at a position after a chunk or one of its drafts."""
    sequence, request = chunk.sequence, chunk.sequence.request
    assert sequence.slot is not None
    return NextToken(request.options, seeds[sequence.id], position, position - len(request.ids), sequence.slot, mask)


def _fetched[T](found: T) -> T:
    """Starts to copy arrays to the host."""
    for array in jax.tree.leaves(found):
        array.copy_to_host_async()
    return found


def _logprob(found: LogProbs, row: int, token: int, count: int) -> TokenLogprob:
    top = zip(found.top_ids[row, :count].tolist(), found.top[row, :count].tolist(), strict=True)
    return TokenLogprob(token, float(found.token[row]), int(found.rank[row]), tuple(top))
