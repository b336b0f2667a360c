"""Runs the plans of a scheduler on the device."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int32

from axcore.infer.programs import Batch, Buckets, Programs, bucket
from axcore.infer.requests import SamplingOptions, TokenLogprob
from axcore.infer.sampling import LogProbs, Method, NextToken, Sampled, SamplingRows
from axcore.infer.sampling.rows import PADDING
from axcore.infer.sequences import Chunk, Plan

Seed = tuple[int, int]
"""The words of a seed; see `seed_words`."""

Mask = Callable[[], Int32[np.ndarray, " words"]]
"""Returns the tokens that a sequence may sample, as `NextToken.grammar`."""


class SampledToken(NamedTuple):
    """A sampled token.

    Attributes:
        token: the token; None: every token is excluded, or the logits are not finite.
        logprob: its log-probability, if the request asks for it.
    """

    token: int | None
    logprob: TokenLogprob | None


class SamplerCall(NamedTuple):
    """A call of the sampler: the chunk of each row that is no padding, and the result, which is on the device."""

    rows: Mapping[int, Chunk]
    sampled: Sampled


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
    """

    def __init__(self, programs: Programs, buckets: Buckets, eos_ids: Collection[int]):
        self._programs, self._buckets, self._eos_ids = programs, buckets, eos_ids
        self._decoder = programs.decoder
        self._is_paged = self._decoder.paging is not None

    def start(self, plan: Plan, seeds: Mapping[int, Seed], masks: Mapping[int, Mask]) -> StepInFlight:
        """Starts a step, without waiting for the device.

        Args:
            plan: the newest plan of the scheduler.
            seeds: the seed of each sequence, by id.
            masks: the tokens that each sequence with a grammar may sample, by id. They are computed while the device
                runs the model.
        """
        calls, scores, states = [], [], []
        if plan.decode:
            rows = {self._row(row, chunk): chunk for row, chunk in enumerate(plan.decode)}
            logits = self._logits_of_decoding(rows, bucket(self._buckets.rows, len(rows)))
            calls.append(self._sampled(rows, logits, seeds, masks))
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
                self._count(chunk)
                calls.append(self._sampled({0: chunk}, logits, seeds, masks))
        for array in jax.tree.leaves([found for _, found in scores] + [found for _, found in states]):
            array.copy_to_host_async()
        return StepInFlight(plan, calls, scores, states)

    def read(self, flight: StepInFlight) -> dict[int, SampledToken]:
        """Waits for a step. Returns what each sequence sampled, by id; an arbitrary token if it has no output."""
        found = {chunk.sequence.id: SampledToken(0, None) for chunk, _ in flight.states if chunk.is_last}
        for rows, on_device in flight.calls:
            sampled: Sampled = jax.device_get(on_device)
            for row, chunk in rows.items():
                token = int(sampled.tokens[row]) if sampled.valid[row] else None
                count, logprob = chunk.sequence.request.options.logprobs, None
                if token is not None and count is not None and sampled.logprobs is not None:
                    logprob = _logprob(sampled.logprobs, row, token, count)
                found[chunk.sequence.id] = SampledToken(token, logprob)
        return found

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
        tables, paging = self._buckets.pages or (0,), self._decoder.paging
        for size, pages in itertools.product(self._buckets.rows, tables):
            logits[size] = self._logits_of_decoding({}, size, pages)
        for width, pages in itertools.product(self._buckets.widths, tables):
            if paging is None or pages >= paging.pages_for(width):
                logits[1] = self._logits_of_prompt({}, width, pages)
                if prompt_logprobs:
                    self._programs.scored(self._packed({}, 1, width, pages), np.zeros((1, width), np.int32))
                if embeddings:
                    self._programs.embedded(self._packed({}, 1, width, pages))
        for (size, of_size), method, asked in itertools.product(logits.items(), methods, (None, 0)):
            padding = dataclasses.replace(PADDING, options=SamplingOptions(temperature=0.0, logprobs=asked))
            self._sample(of_size, [padding] * size, method)
            if grammars and method == "full":
                every = np.full(-(-self._programs.vocab_size // 32), -1, np.int32)
                self._sample(of_size, [dataclasses.replace(padding, grammar=every)] * size, method)
        self._programs.count(self._decoder.batch_size, (), 0)
        self._programs.erase(self._decoder.batch_size)

    def _row(self, row: int, chunk: Chunk) -> int:
        """The row of a chunk that decodes: without pages its slot, because caches of all slots are read in place."""
        slot = chunk.sequence.slot
        assert slot is not None
        return row if self._is_paged else slot

    def _logits_of_decoding(self, rows: Mapping[int, Chunk], size: int, pages: int = 1) -> Float[Array, "rows vocab"]:
        return self._programs.logits(self._packed(rows, size, 1, pages), "decode", whole=not self._is_paged)

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
        masks: Mapping[int, Mask],
    ) -> SamplerCall:
        tokens = [PADDING] * logits.shape[0]
        for row, chunk in rows.items():
            sequence = chunk.sequence
            position = chunk.start + chunk.count
            num_output = position - len(sequence.request.ids)
            slot = sequence.slot
            assert slot is not None
            seed, mask = seeds[sequence.id], masks.get(sequence.id)
            grammar = None if mask is None else mask()
            tokens[row] = NextToken(sequence.request.options, seed, position, num_output, slot, grammar)
        found = self._sample(logits, tokens, None)
        for array in jax.tree.leaves(found):
            array.copy_to_host_async()
        return SamplerCall(rows, found)

    def _sample(
        self, logits: Float[Array, "rows vocab"], tokens: Sequence[NextToken], method: Method | None
    ) -> Sampled:
        packed = SamplingRows.of(tokens, vocab_size=self._programs.vocab_size, eos_ids=self._eos_ids, method=method)
        slots = np.array([token.slot for token in tokens], np.int32)
        return self._programs.sampled(logits, slots, packed)

    def _count(self, chunk: Chunk) -> None:
        """Counts the tokens of a row that starts to sample, if it has penalties."""
        sequence, options = chunk.sequence, chunk.sequence.request.options
        if options.frequency_penalty or options.presence_penalty or options.repetition_penalty != 1:
            assert sequence.slot is not None
            self._programs.count(sequence.slot, sequence.tokens, len(sequence.request.ids))


def _logprob(found: LogProbs, row: int, token: int, count: int) -> TokenLogprob:
    top = zip(found.top_ids[row, :count].tolist(), found.top[row, :count].tolist(), strict=True)
    return TokenLogprob(token, float(found.token[row]), int(found.rank[row]), tuple(top))
