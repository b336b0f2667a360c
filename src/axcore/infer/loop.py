"""The thread of an engine: it plans steps, runs them on the device and delivers what they sample."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Collection

import numpy as np

from axcore.config import AxcoreError, ConfigError
from axcore.infer.embeddings import PooledStates
from axcore.infer.guide import Guide
from axcore.infer.handover import Export, Handover
from axcore.infer.loaded_adapters import LoadedAdapters
from axcore.infer.requests import Piece, Request, TokenLogprob
from axcore.infer.runner import Runner, Seed
from axcore.infer.sampling import Method, seed_words
from axcore.infer.scheduler import Scheduler
from axcore.infer.sequences import Plan, SavedState, Sequence
from axcore.infer.speculation import Drafter, Drafts
from axcore.infer.stats import EngineStats
from axcore.infer.step_in_flight import SampledToken, StepInFlight
from axcore.infer.streams import Deliver
from axcore.infer.text import TextStream

_logger = logging.getLogger(__name__)


class EngineLoop:
    """Owns the device. While the device runs a step, the thread plans and dispatches the next, unless a sequence of the
    step needs its last token first.

    Public methods may be called from any thread.

    Args:
        scheduler: plans the steps.
        runner: runs them.
        free: frees the memory of the device.
        eos_ids: the tokens that end a sample.
        adapters: the adapters that requests can use.
        drafter: proposes drafts; None: no speculative decoding.

    Attributes:
        counters: the steps and the tokens so far, which the loop counts.
        is_closed: whether it takes no more work, because it was closed or has failed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        free: Callable[[], None],
        eos_ids: Collection[int],
        adapters: LoadedAdapters,
        drafter: Drafter | None = None,
    ):
        self.counters, self.is_closed, self._drafter = EngineStats(), False, drafter
        self._scheduler, self._runner, self._free, self._eos_ids = scheduler, runner, free, eos_ids
        self._adapters = adapters
        self._samples: dict[int, _Sample] = {}
        self._exports: dict[int, tuple[_Sample, Piece]] = {}  # samples that end when their state is read
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._closing = threading.Lock()  # held to set `is_closed`, and to put work that must be done or refused
        self._thread = threading.Thread(target=self._serve, name="axcore-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that still calls JAX at exit may crash the process

    def submit(
        self,
        request: Request,
        deliver: Deliver,
        text: TextStream | None,
        guide: Guide | None,
        *,
        sample: int,
        handover: Handover | None = None,
        export: Export | None = None,
    ) -> Callable[[], None]:
        """Queues a checked request. For the other arguments, the result and the errors see `Engine.submit`.

        Args:
            text: converts the tokens of the sample to text.
            guide: follows the grammar of the sample.
            handover: the prompt and the first token, which another engine has computed.
            export: is called in place of `deliver`. The sample ends with its first token.
        """
        sequence = Sequence(next(self._numbers), request, self._eos_ids)
        is_drafted = self._drafter is not None and request.pooling is None
        sequence.needs_last_token, sequence.is_exported = guide is not None or is_drafted, export is not None
        pooled = None if request.pooling is None else PooledStates(request.pooling)
        new = _Sample(sequence, deliver, seed_words(request.options.seed, sample), text, guide, pooled, export)
        add = functools.partial(self._add, new)
        self._put(add if handover is None else functools.partial(self._resume, new, handover))
        return lambda: self._inbox.put(functools.partial(self._cancel, sequence.id))

    def warm_up(
        self,
        methods: tuple[Method, ...],
        *,
        prompt_logprobs: bool,
        embeddings: bool,
        grammars: bool,
        transfers: bool,
    ) -> None:
        """See `Runner.warm_up`. It ends early if the loop is closed meanwhile."""
        self.in_thread(
            functools.partial(
                self._runner.warm_up,
                methods,
                prompt_logprobs=prompt_logprobs,
                embeddings=embeddings,
                grammars=grammars,
                transfers=transfers,
                check=self._check_open,
            )
        )
        if self._drafter is not None:
            self.in_thread(functools.partial(self._drafter.warm_up, methods))

    def close(self) -> None:
        """See `Engine.close`."""
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
        """Runs `work` in the engine's thread, and waits for it."""
        if threading.current_thread() is self._thread:
            raise AxcoreError("`deliver` runs in the engine's thread, so it cannot wait for the engine")
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                self._check_open()
                work()
            except BaseException as error:
                done.put(error)
            else:
                done.put(None)

        self._put(run)
        if (error := done.get()) is not None:
            raise error

    # What follows runs in the thread.

    def _check_open(self) -> None:
        if self.is_closed:
            raise AxcoreError("the engine was closed") from self._failure

    def _serve(self) -> None:
        flight: StepInFlight | None = None
        try:
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
        except BaseException as error:
            self._failure = error
        with self._closing:
            self.is_closed = True
        atexit.unregister(self.close)
        reason = "was closed" if self._failure is None else f"failed: {type(self._failure).__name__}: {self._failure}"
        self._read_inbox(wait=False)
        for sample in [*self._samples.values(), *(sample for sample, _ in self._exports.values())]:
            ended = AxcoreError(f"the engine {reason}")
            ended.__cause__ = self._failure
            self._send(sample, ended)
        self._samples.clear()
        self._exports.clear()
        if self._drafter is not None:
            self._drafter.close()
        self._free()

    def _read_inbox(self, *, wait: bool) -> None:
        if wait:
            self._inbox.get()()
        while not self._inbox.empty():  # no other thread reads it
            self._inbox.get()()

    def _has_adapter(self, sample: _Sample) -> bool:
        """Finds the adapter of a request. One that was unloaded since the request was checked ends the sample."""
        if (adapter := sample.sequence.request.adapter) is not None:
            try:
                sample.sequence.adapter = self._adapters.find(adapter)
            except ConfigError as error:
                self._send(sample, error)
                return False
        return True

    def _add(self, sample: _Sample) -> None:
        if not self._has_adapter(sample):
            return
        self._scheduler.add(sample.sequence)
        self._samples[sample.sequence.id] = sample
        self.counters.prompt_tokens += len(sample.sequence.request.ids)

    def _resume(self, sample: _Sample, handover: Handover) -> None:
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
        sequence.num_computed, sequence.num_cached = len(sequence.tokens), 0
        sequence.extend(handover.ids[-1:])
        if sequence.finish_reason is None:
            # A sample that has to wait does not take memory of a device.
            state = handover.state.on_host() if self._scheduler.num_waiting else handover.state
            sequence.saved = SavedState(handover=state)
            self._scheduler.add(sequence)
        self._samples[sequence.id] = sample
        sample.scores.update(enumerate(scores, 1))
        self._deliver(sample, [SampledToken(handover.ids[-1], handover.logprob)])

    def _cancel(self, number: int) -> None:
        if self._scheduler.cancel(number):
            self._runner.transfers.exported.pop(number, None)
            self._send(self._samples.pop(number), Piece((), finish_reason="cancelled"))

    def _drafts(self) -> Drafts:
        """The drafts of the sequences that decode."""
        if self._drafter is None or not (sequences := self._scheduler.decoding):
            return {}
        return self._drafter.propose(sequences, {each.id: self._samples[each.id].seed for each in sequences})

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
                self._samples[number].scores[position] = score
        for chunk, states in flight.hidden_states():
            if (sample := self._samples.get(chunk.sequence.id)) is not None and sample.pooled is not None:
                sample.pooled.add(states, start=chunk.start)
        for chunk in flight.plan.decode:
            self.counters.draft_tokens += chunk.num_drafts
            self.counters.accepted_tokens += max(len(found[chunk.sequence.id]) - 1, 0)
        for number, sampled in found.items():
            if not sampled and self._scheduler.cancel(number):
                sample = self._samples.pop(number)
                failure = None if sample.guide is None else sample.guide.failure
                self._send(sample, failure or AxcoreError(_NO_TOKEN))
        tokens = {number: tuple(each.token for each in sampled) for number, sampled in found.items()}
        for sequence, count in self._scheduler.record(flight.plan, tokens).items():
            sample = self._samples[sequence.id]
            if sample.pooled is not None:
                self._deliver_embedding(sample, sample.pooled)
                continue
            self._deliver(sample, found[sequence.id][:count])

    def _deliver_embedding(self, sample: _Sample, pooled: PooledStates) -> None:
        """Delivers the embedding of a prompt that is computed, and forgets its sample."""
        sequence = sample.sequence
        del self._samples[sequence.id]
        self.counters.cached_tokens += sequence.num_cached or 0
        embedding = pooled.embedding(len(sequence.request.ids))
        if np.isfinite(embedding).all():
            self._send(sample, Piece((), finish_reason="length", embedding=embedding))
        else:
            self._send(sample, AxcoreError("the hidden states are not finite. Check the weights"))

    def _deliver(self, sample: _Sample, new: list[SampledToken]) -> None:
        """Delivers new tokens, and forgets a sample that ends."""
        sequence, stream, text = sample.sequence, sample.text, ""
        is_first = sequence.num_output == len(new)
        for at, each in enumerate(new):
            is_end = sequence.finish_reason == "stop" and at == len(new) - 1
            if sample.guide is not None and not is_end:
                sample.guide.accept(each.token)
            if stream is not None:
                text += stream.add((each.token,))
            has_ended = sample.guide is not None and sample.guide.has_ended
            if has_ended or (stream is not None and stream.stopped is not None):
                sequence.drop(len(new) - 1 - at)  # what follows the end
                new = new[: at + 1]
                self._stop(sequence)
                break
        if stream is not None and sequence.finish_reason is not None:
            text += stream.finish()
        self.counters.tokens += len(new)
        if is_first:
            self.counters.cached_tokens += sequence.num_cached or 0
        logprobs = tuple(each.logprob for each in new if each.logprob is not None) or None
        if sequence.finish_reason is not None:
            del self._samples[sequence.id]
        scores = None
        if is_first and sequence.request.options.prompt_logprobs:
            scores = tuple(sample.scores[at] for at in range(1, len(sequence.request.ids)))
        ids = tuple(each.token for each in new)
        piece = Piece(ids, text, logprobs, sequence.finish_reason, scores)
        if sample.export is not None:
            self._exports[sequence.id] = sample, piece
            return
        self._send(sample, piece)

    def _deliver_exports(self) -> None:
        """Delivers the exports whose state was read."""
        exported = self._runner.transfers.exported
        for number in [number for number in self._exports if number in exported]:
            (sample, piece), state = self._exports.pop(number), exported.pop(number)
            assert sample.export is not None
            adapter = None if sample.sequence.adapter is None else sample.sequence.adapter.identity
            self._call(sample, functools.partial(sample.export, piece, state, adapter))

    def _stop(self, sequence: Sequence) -> None:
        """Ends a sequence with its last token, which may also be the last one by its length."""
        self._scheduler.cancel(sequence.id, "stop")
        sequence.finish_reason = "stop"

    def _send(self, sample: _Sample, piece: Piece | AxcoreError) -> None:
        """Calls `deliver`. A sample whose `deliver` raises ends, and others go on."""
        self._call(sample, functools.partial(sample.deliver, piece))

    def _call(self, sample: _Sample, deliver: Callable[[], None]) -> None:
        try:
            deliver()
        except Exception:
            number = sample.sequence.id
            _logger.exception("deliver of sample %d raised an exception, so the sample ends", number)
            if not self.is_closed and self._scheduler.cancel(number):
                self._samples.pop(number, None)


_NO_TOKEN = (
    "no token can be sampled: the logits are not finite, or the grammar, logit_bias and min_tokens exclude every "
    "token. Check the weights and the sampling options"
)


@dataclasses.dataclass(frozen=True)
class _Sample:
    """A sample that has not ended."""

    sequence: Sequence
    deliver: Deliver
    seed: Seed
    text: TextStream | None
    guide: Guide | None
    pooled: PooledStates | None
    export: Export | None
    scores: dict[int, TokenLogprob] = dataclasses.field(default_factory=dict)
    """The log-probabilities of the prompt so far, by position."""
