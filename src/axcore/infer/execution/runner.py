"""Runs the plans of a scheduler on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from axcore.infer.execution.batches import Packer, slot_of
from axcore.infer.execution.buckets import Buckets
from axcore.infer.execution.programs import Programs
from axcore.infer.execution.step_in_flight import SampledToken, SamplerCall, StepInFlight
from axcore.infer.execution.transfers import Transfers
from axcore.infer.sampling import NextToken, Seed
from axcore.infer.sampling.acceptance import NO_DRAFT
from axcore.infer.sampling.rows import PADDING
from axcore.infer.sequences import Chunk, Plan

type Mask = Int32[np.ndarray, " words"]
"""The tokens that a sequence may sample, as `NextToken.grammar`."""

Masks = Callable[[tuple[int, ...]], list[Mask]]
"""Returns the mask of the next token, and that after each of some drafts."""


class Runner:
    """Runs steps: calls the programs on the chunks of a plan, packed into rows.

    Args:
        programs: the programs.
        transfers: moves decoding state out of the device and back.
        buckets: the sizes to which rows are padded.
        num_drafts: the largest number of drafts of a row.
    """

    def __init__(self, programs: Programs, transfers: Transfers, buckets: Buckets, num_drafts: int = 0):
        self._programs, self._transfers, self._num_drafts = programs, transfers, num_drafts
        self._packer = Packer(programs.decoder, buckets)
        self._counted: dict[int, int] = {}  # the sequence whose tokens are counted, by slot

    def start(self, plan: Plan, seeds: Mapping[int, Seed], masks: Mapping[int, Masks]) -> StepInFlight:
        """Starts a step, without waiting for the device.

        Args:
            plan: the newest plan of the scheduler.
            seeds: the seed of each sequence, by id.
            masks: the tokens that each sequence with a grammar may sample, by id. They are computed while the device
                runs the model.
        """
        self._transfers.start(plan.transfers, plan.number)
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
            call, rows, number = self._packer.call(decode, prompts)
            logits = self._programs.logits(call)
            if rows:
                calls.append(self._sampled(rows, logits, seeds, masks))
            decode, prompts = (), prompts[number:]
        for chunk in filter(_is_alone, plan.prefill):
            batch = self._packer.alone(chunk)
            if chunk.sequence.request.pooling is not None:
                states.append((chunk, self._programs.embedded(batch)))
                continue
            logits, found = self._programs.scored(batch, _targets(chunk, batch.ids.shape[1]))
            scores.append((chunk, found))
            if chunk.is_last:
                calls.append(self._sampled({0: chunk}, logits, seeds, masks))
        for array in jax.tree.leaves([found for _, found in scores] + [found for _, found in states]):
            array.copy_to_host_async()
        return StepInFlight(plan, calls, scores, states)

    def read(self, flight: StepInFlight) -> dict[int, list[SampledToken]]:
        """Waits for a step and its copies to the host. Returns the sampled tokens; see `StepInFlight.tokens`."""
        self._transfers.finish(flight.plan.number)
        return flight.tokens()

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
        return SamplerCall(rows, _fetched(self._programs.sampled(logits, tokens)))

    def _verified(self, decode: Sequence[Chunk], seeds: Mapping[int, Seed], masks: Mapping[int, Masks]) -> SamplerCall:
        """Runs the model on rows that decode, of which some have drafts, and samples their next tokens."""
        width = 1 + self._num_drafts
        rows, batch = self._packer.decoding(decode, width)
        logits, size = self._programs.logits_of_drafts(batch), len(batch.ids)
        tokens, drafts = [PADDING] * (size * width), np.full((size, width - 1), NO_DRAFT, np.int32)
        for row, chunk in rows.items():
            of_row = chunk.ids[1:]
            drafts[row, : len(of_row)] = of_row
            allowed = masks[chunk.sequence.id](of_row) if chunk.sequence.id in masks else [None] * chunk.count
            for at, mask in enumerate(allowed):
                tokens[row * width + at] = _next_token(chunk, chunk.start + 1 + at, seeds, mask)
        return SamplerCall(rows, _fetched(self._programs.verified(logits, drafts, tokens)))

    def _count(self, chunk: Chunk) -> None:
        """Counts the tokens of a row that starts to sample, if it has penalties."""
        sequence, options = chunk.sequence, chunk.sequence.request.options
        if self._counted.get(slot_of(chunk)) == sequence.id:
            return
        # A sequence that was preempted may come back to an earlier slot, whose counts lack its newest tokens.
        self._counted = {slot: id for slot, id in self._counted.items() if id != sequence.id}
        self._counted[slot_of(chunk)] = sequence.id
        if options.frequency_penalty or options.presence_penalty or options.repetition_penalty != 1:
            self._programs.count(slot_of(chunk), sequence.tokens, len(sequence.request.ids))


def _is_alone(chunk: Chunk) -> bool:
    """Whether a chunk is computed by a call of its own, since more than the logits of its last token is asked for."""
    request = chunk.sequence.request
    return request.pooling is not None or request.options.prompt_logprobs


def _targets(chunk: Chunk, width: int) -> Int[np.ndarray, "1 width"]:
    """The token after each token of a chunk of a prompt; 0 where it is unknown, and in padding."""
    targets = np.zeros((1, width), np.int32)
    after = chunk.sequence.tokens[chunk.start + 1 : chunk.start + 1 + chunk.count]
    targets[0, : len(after)] = after
    return targets


def _next_token(chunk: Chunk, position: int, seeds: Mapping[int, Seed], mask: Mask | None) -> NextToken:
    """The token at a position after a chunk or one of its drafts."""
    sequence, request = chunk.sequence, chunk.sequence.request
    num_output = position - len(request.ids)
    return NextToken(request.options, seeds[sequence.id], position, num_output, slot_of(chunk), mask)


def _fetched[T](found: T) -> T:
    """Starts to copy arrays to the host."""
    for array in jax.tree.leaves(found):
        array.copy_to_host_async()
    return found
