"""The throughput and latency of an engine under a constant number of concurrent requests."""

from __future__ import annotations

import dataclasses
import functools
import random
import threading
import time
from typing import NamedTuple

import numpy as np

from axcore.config import AxcoreError
from axcore.infer.engine import Engine
from axcore.infer.requests import Piece, Request, SamplingOptions


@dataclasses.dataclass(frozen=True)
class Load:
    """The requests of a test: random prompts of one length, greedy outputs of one length.

    Attributes:
        num_requests: requests in total.
        concurrency: requests at any time. The next one is sent when one ends.
        prompt_tokens, output_tokens: the lengths.
    """

    num_requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise AxcoreError(f"{name} must be at least 1, not {value}")


class Figures(NamedTuple):
    """What a test measured.

    Attributes:
        seconds: from the first request to the last token.
        output_tokens_per_s: sampled tokens per second, of all requests.
        first_token_ms_p50, first_token_ms_p99: from a request to its first token.
        next_token_ms_p50, next_token_ms_p99: from a token to the next one of the same request.
        decode_tokens_per_s: tokens per second of one request after its first token, the median.
    """

    seconds: float
    output_tokens_per_s: float
    first_token_ms_p50: float
    first_token_ms_p99: float
    next_token_ms_p50: float
    next_token_ms_p99: float
    decode_tokens_per_s: float


def measure(engine: Engine, load: Load, *, seed: int = 0) -> Figures:
    """Runs a load. Call `Engine.warm_up` first, so that nothing compiles meanwhile.

    Raises:
        AxcoreError: a request failed or ended early.
    """
    return _Test(engine, load, seed).run()


class _Test:
    """A running test. `_receive` runs in the engine's thread, which takes less time than handing pieces to another."""

    def __init__(self, engine: Engine, load: Load, seed: int):
        self._engine, self._load = engine, load
        # Made before the clock starts. Two threads take them, each request once.
        self._requests = iter(_requests(engine.vocab_size, load, random.Random(seed)))
        self._times: list[list[float]] = []
        self._num_ended = 0
        self._error: AxcoreError | None = None
        self._done = threading.Event()

    def run(self) -> Figures:
        started = time.perf_counter()
        for _ in range(self._load.concurrency):
            self._send()
        self._done.wait()
        if self._error is not None:
            raise self._error
        seconds = time.perf_counter() - started
        first = np.array([times[1] - times[0] for times in self._times])
        gaps = np.concatenate([np.diff(times[1:]) for times in self._times])
        rates = [(len(times) - 2) / (times[-1] - times[1]) for times in self._times if len(times) > 2]
        return Figures(
            seconds=seconds,
            output_tokens_per_s=self._load.num_requests * self._load.output_tokens / seconds,
            first_token_ms_p50=_percentile(first, 50),
            first_token_ms_p99=_percentile(first, 99),
            next_token_ms_p50=_percentile(gaps, 50),
            next_token_ms_p99=_percentile(gaps, 99),
            decode_tokens_per_s=float(np.median(rates)) if rates else 0.0,
        )

    def _send(self) -> None:
        """Submits the next request, if one is left."""
        if (request := next(self._requests, None)) is not None:
            times = [time.perf_counter()]
            self._times.append(times)
            self._engine.submit(request, functools.partial(self._receive, times))

    def _receive(self, times: list[float], piece: Piece | AxcoreError) -> None:
        if isinstance(piece, AxcoreError):
            self._error = piece
            self._done.set()
            return
        times.append(time.perf_counter())
        if piece.finish_reason is None:
            return
        self._num_ended += 1
        if self._num_ended == self._load.num_requests:
            self._done.set()
        else:
            self._send()


def _requests(vocab_size: int, load: Load, rng: random.Random) -> list[Request]:
    options = SamplingOptions(temperature=0.0, max_tokens=load.output_tokens, ignore_eos=True)
    prompts = [tuple(rng.randrange(vocab_size) for _ in range(load.prompt_tokens)) for _ in range(load.num_requests)]
    return [Request(ids, options) for ids in prompts]


def _percentile(seconds: np.ndarray, share: int) -> float:
    """In milliseconds."""
    return 1e3 * float(np.percentile(seconds, share)) if seconds.size else 0.0
