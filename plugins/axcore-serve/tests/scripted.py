"""An engine whose output is written down, for tests of the server alone."""

import threading

import numpy as np

from axcore.config import AxcoreError
from axcore.infer import EngineStats, Piece, TokenLogprob
from axcore.infer.engine import BaseEngine
from axcore.infer.scheduling.limits import SchedulerLimits
from axcore.infer.scheduling.scheduler import Scheduler
from axcore.infer.text import TextStream
from axcore.train.data import ByteTokenizer


class Job:
    """A sample that was submitted."""

    def __init__(self, engine, request, deliver, sample, ids):
        self.request, self.sample, self.is_cancelled = request, sample, False
        self._deliver, self._ids, self._at, self._eos_ids = deliver, ids, 0, engine.tokenizer.eos_ids
        self._text = TextStream(engine.tokenizer, prompt=request.ids, stop=request.options.stop)
        room = engine.max_len - len(request.ids)
        self._most = room if request.options.max_tokens is None else request.options.max_tokens
        self.has_ended = False

    def step(self, count=1):
        """Delivers the next tokens, or the embedding of the prompt."""
        for _ in range(count):
            if self.has_ended:
                return
            if self.request.pooling is not None:
                self.has_ended = True
                ids = np.array(self.request.ids, np.float32)
                embedding = np.array([{"last": ids[-1], "mean": ids.mean()}[self.request.pooling], len(ids), 0.0])
                self._deliver(Piece((), finish_reason="length", embedding=embedding.astype(np.float32)))
                return
            options, token = self.request.options, self._ids[self._at % len(self._ids)]
            self._at += 1
            text, finish = self._text.add([token]), None
            if self._text.stopped is not None or token in self._eos_ids:
                finish = "stop"
            elif self._at >= self._most:
                finish = "length"
            if finish is not None and self._text.stopped is None:
                text += self._text.finish()
            asked, logprobs, scores = options.logprobs, None, None
            if asked is not None:
                logprobs = (_logprob(token, asked),)
            if options.prompt_logprobs and self._at == 1:
                scores = tuple(_logprob(id, asked or 0) for id in self.request.ids[1:])
            self.has_ended = finish is not None
            num_cached = len(self.request.ids) - 1 if self._at == 1 else 0
            self._deliver(Piece((token,), text, logprobs, finish, scores, num_cached=num_cached))

    def fail(self, message):
        self.has_ended = True
        self._deliver(AxcoreError(message))

    def cancel(self):
        if not self.has_ended:
            self.has_ended = self.is_cancelled = True
            self._deliver(Piece((), finish_reason="cancelled"))


def _logprob(id, count):
    top = ((id, -0.25), (128, -1.5), (129, -float("inf")), (260, -2.0), (261, -3.0))
    return TokenLogprob(id, -0.25, 0, top[:count])


class Scripted(BaseEngine):
    """Repeats `ids` after every prompt.

    Attributes:
        holds: whether jobs wait for `Job.step`. If not, they run to their end at once.
    """

    def __init__(self, ids=b"one two three ", *, max_len=4096, holds=False, tokenizer=None):
        self.ids, self.holds, self.max_len, self.is_closed = list(ids), holds, max_len, False
        self.tokenizer = tokenizer or ByteTokenizer.Config().build()
        self.vocab_size, self.eos_ids = self.tokenizer.vocab_size, self.tokenizer.eos_ids
        self.jobs, self.adapters = [], ()
        self._scheduler = Scheduler(SchedulerLimits(4, max_len, 64))
        self._lock = threading.Lock()

    def check(self, request):
        request.check(self.vocab_size)
        self._scheduler.check(request)

    def submit(self, request, deliver, *, sample=0):
        if self.is_closed:
            raise AxcoreError("the engine is closed")
        job = Job(self, request, deliver, sample, self.ids)
        with self._lock:
            self.jobs.append(job)
        if not self.holds:
            while not job.has_ended:
                job.step()
        return job.cancel

    @property
    def stats(self):
        alive = sum(not job.has_ended for job in self.jobs)
        return EngineStats(
            running=alive,
            preempted=3,
            steps=5,
            tokens=7,
            prompt_tokens=11,
            cached_tokens=2,
            saved_states=4,
            compiled=13,
        )
