"""The samples of one HTTP request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from axcore.config import AxcoreError
from axcore.infer import Engine, Piece, Request
from axcore_serve.errors import ApiError, of_engine
from axcore_serve.metrics import Metrics


class Wanted(NamedTuple):
    """A sample that a request asks for: its prompt and options, and its number among the samples of this prompt."""

    request: Request
    sample: int


class Samples:
    """Submits samples, and merges their pieces in the order of arrival.

    Args:
        engine: the engine.
        wanted: the samples.
        metrics: observes the latencies.
        timeout_s: seconds after which the samples are given up.

    Raises:
        ApiError: the engine takes no requests.
    """

    def __init__(self, engine: Engine, wanted: Sequence[Wanted], metrics: Metrics, timeout_s: float):
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[tuple[int, Piece | AxcoreError]] = asyncio.Queue()
        self._metrics, self._timeout_s = metrics, timeout_s
        self._deadline = self._loop.time() + timeout_s
        self._times = [time.perf_counter()] * len(wanted)
        self._has_begun = [False] * len(wanted)
        self._cancels = []
        try:
            for index, (request, sample) in enumerate(wanted):
                deliver = functools.partial(self._deliver, index)
                self._cancels.append(engine.submit(request, deliver, sample=sample))
        except AxcoreError as error:
            self.close()
            raise of_engine(error) from error

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        """The index and the next piece of a sample, until all samples have ended.

        Raises:
            ApiError: a sample failed, or took too long.
        """
        remaining = len(self._cancels)
        while remaining:
            try:
                async with asyncio.timeout_at(self._deadline):
                    index, piece = await self._pieces.get()
            except TimeoutError as error:
                raise ApiError(
                    504, f"the request took longer than {self._timeout_s:g} s. Ask for fewer tokens", code="timeout"
                ) from error
            if isinstance(piece, AxcoreError):
                raise of_engine(piece) from piece
            remaining -= piece.finish_reason is not None
            yield index, piece

    def close(self) -> None:
        """Cancels the samples that have not ended."""
        for cancel in self._cancels:
            cancel()

    def _deliver(self, index: int, piece: Piece | AxcoreError) -> None:
        """Runs in the thread of the engine."""
        now = time.perf_counter()
        if isinstance(piece, Piece) and piece.ids:
            histogram = self._metrics.next_token if self._has_begun[index] else self._metrics.first_token
            histogram.observe(now - self._times[index])
            self._times[index], self._has_begun[index] = now, True
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nobody waits
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, (index, piece))
