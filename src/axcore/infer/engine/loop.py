"""The thread of an engine: it plans steps, runs them on the device and delivers what they sample."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable

from axcore.config import AxcoreError, ConfigError
from axcore.infer.disaggregation.handover import Handover
from axcore.infer.engine.core import EngineCore
from axcore.infer.engine.samples import Sample
from axcore.infer.execution.step_in_flight import SampledToken, StepInFlight
from axcore.infer.requests import Piece
from axcore.infer.sequences import Plan, SavedState
from axcore.infer.speculation import Drafts
from axcore.infer.stats import EngineStats

PAUSE_SECONDS = 0.0005
"""An idle engine with bursts starts its first step when no request arrives for this time."""
GATHERING_SECONDS = 0.005
"""It starts after this time at the latest."""

_logger = logging.getLogger(__name__)


class EngineLoop:
    """Owns the device. While the device runs a step, the thread plans and dispatches the next, unless a sequence of the
    step needs its last token first.

    Public methods may be called from any thread.

    Args:
        core: what runs the steps.

    Attributes:
        counters: the steps and the tokens so far, which the loop counts.
        is_closed: whether it takes no more work, because it was closed or has failed.
    """

    def __init__(self, core: EngineCore):
        self.counters, self.is_closed = EngineStats(), False
        self._core, self._scheduler, self._runner = core, core.scheduler, core.runner
        self._samples: dict[int, Sample] = {}
        self._exports: dict[int, tuple[Sample, Piece]] = {}  # samples that end when their state is read
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._closing = threading.Lock()  # held to set `is_closed`, and to put work that must be done or refused
        self._thread = threading.Thread(target=self._serve, name="axcore-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that still calls JAX at exit may crash the process

    def submit(self, sample: Sample, handover: Handover | None = None) -> Callable[[], None]:
        """Queues a sample. Returns a function that cancels it, at any time and from any thread.

        Args:
            sample: a sample whose request was checked.
            handover: its prompt and first token, which another engine has computed.

        Raises:
            AxcoreError: the engine is closed.
        """
        add = functools.partial(self._add, sample)
        self._put(add if handover is None else functools.partial(self._resume, sample, handover))
        return lambda: self._inbox.put(functools.partial(self._cancel, sample.sequence.id))

    def close(self) -> None:
        """Ends the thread, which ends all samples and frees the device. Waits for it, except in the thread itself."""
        with self._closing:
            self.is_closed = True
        self._inbox.put(lambda: None)  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _put(self, work: Callable[[], None]) -> None:
        """Queues work for the engine's thread.

        Raises:
            AxcoreError: the engine is closed.
        """
        with self._closing:
            if self.is_closed:
                raise AxcoreError("the engine is closed") from self._failure
            self._inbox.put(work)

    def in_thread(self, work: Callable[[], None]) -> None:
        """Runs `work` in the engine's thread, and waits for it.

        Raises:
            AxcoreError: the engine is closed, or this is its thread.
        """
        if threading.current_thread() is self._thread:
            raise AxcoreError("`deliver` runs in the engine's thread, so it cannot wait for the engine")
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                self.check_open()
                work()
            except BaseException as error:
                done.put(error)
            else:
                done.put(None)

        self._put(run)
        if (error := done.get()) is not None:
            raise error

    def check_open(self) -> None:
        """Raises AxcoreError if the engine is closed."""
        if self.is_closed:
            raise AxcoreError("the engine was closed") from self._failure

    # What follows runs in the thread.

    def _serve(self) -> None:
        try:
            self._run_steps()
        except BaseException as error:
            self._failure = error
        with self._closing:
            self.is_closed = True
        atexit.unregister(self.close)
        self._read_inbox(wait=False)
        self._end_samples()
        self._core.free()

    def _run_steps(self) -> None:
        """Runs steps until the loop is closed. Each is planned and started before the results of the last are read."""
        flight: StepInFlight | None = None
        while not self.is_closed:
            self._read_inbox(wait=flight is None and self._scheduler.is_idle)
            if flight is not None and flight.plan.is_read_first:
                self._collect(flight)
                flight = None
            plan = self._scheduler.plan(self._drafts())
            started = None if plan is None else self._start(plan)
            if flight is not None:
                self._collect(flight)
            flight = started
            self._deliver_exports()

    def _end_samples(self) -> None:
        """Delivers an error to every sample that has not ended."""
        reason = "was closed" if self._failure is None else f"failed: {type(self._failure).__name__}: {self._failure}"
        for sample in [*self._samples.values(), *(sample for sample, _ in self._exports.values())]:
            ended = AxcoreError(f"the engine {reason}")
            ended.__cause__ = self._failure
            self._send(sample, ended)
        self._samples.clear()
        self._exports.clear()

    def _read_inbox(self, *, wait: bool) -> None:
        if wait:
            self._inbox.get()()
            if self._scheduler.limits.burst_tokens is not None:
                self._gather()
        while not self._inbox.empty():  # no other thread reads it
            self._inbox.get()()

    def _gather(self) -> None:
        """Waits for the rest of a burst, of which the first step would otherwise compute a small part."""
        end = time.monotonic() + GATHERING_SECONDS
        with contextlib.suppress(queue.Empty):
            while time.monotonic() < end:
                self._inbox.get(timeout=PAUSE_SECONDS)()

    def _has_adapter(self, sample: Sample) -> bool:
        """Finds the adapter of a request. One that was unloaded since the request was checked ends the sample."""
        if (adapter := sample.sequence.request.adapter) is not None:
            try:
                sample.sequence.adapter = self._core.loaded.find(adapter)
            except ConfigError as error:
                self._send(sample, error)
                return False
        return True

    def _add(self, sample: Sample) -> None:
        if not self._has_adapter(sample):
            return
        self._scheduler.add(sample.sequence)
        self._samples[sample.sequence.id] = sample
        self.counters.prompt_tokens += len(sample.sequence.request.ids)

    def _resume(self, sample: Sample, handover: Handover) -> None:
        """Adds a sample whose prompt and first token are known, and delivers the token."""
        if not self._has_adapter(sample):
            return
        try:
            handover.check_adapter(sample.sequence.adapter)
        except ConfigError as error:
            self._send(sample, error)
            return
        sequence, scores = sample.sequence, handover.prompt_logprobs or ()
        sequence.max_len = self._scheduler.max_len_of(sequence.request)
        sequence.num_computed, sequence.num_cached = len(sequence.tokens), handover.num_cached
        sequence.extend(handover.ids[-1:])
        if sequence.finish_reason is None:
            # A sample that has to wait does not take memory of a device.
            state = handover.state.on_host() if self._scheduler.num_waiting else handover.state
            sequence.saved = SavedState(handover=state)
            self._scheduler.add(sequence)
        self._samples[sequence.id] = sample
        sample.prompt_scores.update(enumerate(scores, 1))
        self._deliver(sample, [SampledToken(handover.ids[-1], handover.logprob)])

    def _cancel(self, number: int) -> None:
        if self._scheduler.cancel(number):
            self._core.transfers.exported.pop(number, None)
            self._send(self._samples.pop(number), Piece((), finish_reason="cancelled"))

    def _drafts(self) -> Drafts:
        """The drafts of the sequences that decode."""
        if self._core.drafter is None or not (sequences := self._scheduler.decoding):
            return {}
        return self._core.drafter.propose(sequences, {each.id: self._samples[each.id].seed for each in sequences})

    def _start(self, plan: Plan) -> StepInFlight:
        self.counters.steps += bool(plan.chunks)
        samples = {chunk.sequence.id: self._samples[chunk.sequence.id] for chunk in plan.chunks}
        return self._runner.start(
            plan,
            {number: sample.seed for number, sample in samples.items()},
            {number: sample.guide.masks for number, sample in samples.items() if sample.guide is not None},
        )

    def _collect(self, flight: StepInFlight) -> None:
        """Reads the results of a step, and delivers them."""
        found = self._runner.read(flight)
        for number, position, score in flight.prompt_logprobs():
            if number in self._samples:
                self._samples[number].prompt_scores[position] = score
        for chunk, states in flight.hidden_states():
            if (sample := self._samples.get(chunk.sequence.id)) is not None and sample.pooled is not None:
                sample.pooled.add(states, start=chunk.start)
        for chunk in flight.plan.decode:
            self.counters.draft_tokens += chunk.num_drafts
            self.counters.accepted_tokens += max(len(found[chunk.sequence.id]) - 1, 0)
        for number, sampled in found.items():
            if not sampled and self._scheduler.cancel(number):
                sample = self._samples.pop(number)
                self._send(sample, sample.failure)
        tokens = {number: tuple(each.token for each in sampled) for number, sampled in found.items()}
        for sequence, count in self._scheduler.record(flight.plan, tokens).items():
            sample = self._samples[sequence.id]
            if sequence.num_output == count:  # its prompt was computed here
                self.counters.cached_tokens += sequence.num_cached or 0
            if sample.pooled is not None:
                self._deliver_embedding(sample)
            else:
                self._deliver(sample, found[sequence.id][:count])

    def _deliver_embedding(self, sample: Sample) -> None:
        """Delivers the embedding of a prompt that is computed, and forgets its sample."""
        del self._samples[sample.sequence.id]
        self._send(sample, sample.embedding())

    def _deliver(self, sample: Sample, new: list[SampledToken]) -> None:
        """Delivers new tokens, and forgets a sample that ends."""
        sequence, piece = sample.sequence, sample.piece(new)
        self.counters.tokens += len(piece.ids)
        if piece.finish_reason is not None:
            self._scheduler.cancel(sequence.id, piece.finish_reason)  # if a stop string or the grammar ended it
            del self._samples[sequence.id]
        if sample.export is not None:
            self._exports[sequence.id] = sample, piece
            return
        self._send(sample, piece)

    def _deliver_exports(self) -> None:
        """Delivers the exports whose state was read."""
        exported = self._core.transfers.exported
        for number in [number for number in self._exports if number in exported]:
            (sample, piece), state = self._exports.pop(number), exported.pop(number)
            assert sample.export is not None
            adapter = None if sample.sequence.adapter is None else sample.sequence.adapter.identity
            self._call(sample, functools.partial(sample.export, piece, state, adapter))

    def _send(self, sample: Sample, piece: Piece | AxcoreError) -> None:
        """Calls `deliver`. A sample whose `deliver` raises ends, and others go on."""
        self._call(sample, functools.partial(sample.deliver, piece))

    def _call(self, sample: Sample, deliver: Callable[[], None]) -> None:
        try:
            deliver()
        except Exception:
            number = sample.sequence.id
            _logger.exception("deliver of sample %d raised an exception, so the sample ends", number)
            if not self.is_closed and self._scheduler.cancel(number):
                self._samples.pop(number, None)
