"""The pieces of a sample, for a thread or a coroutine that waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from axcore.config import AxcoreError
from axcore.infer.requests import Piece

Deliver = Callable[[Piece | AxcoreError], None]
"""Receives each piece of a sample, or the error that ends it. It runs in the thread of the engine, so it must return
soon."""

Submit = Callable[[Deliver], Callable[[], None]]
"""Submits a request. Returns a function that cancels it."""


class Stream(Iterator[Piece]):
    """The pieces of a sample, the last of which has a `finish_reason`. Deleting the stream cancels the sample.

    ```python
    for piece in engine.stream(request):
        print(piece.text, end="")
    ```

    Attributes:
        cancel: ends the sample, from any thread. The last piece then has `finish_reason="cancelled"`.
    """

    def __init__(self, submit: Submit):
        self._pieces: queue.SimpleQueue[Piece | AxcoreError] = queue.SimpleQueue()
        self._has_ended = False
        self.cancel = submit(self._pieces.put)
        weakref.finalize(self, self.cancel).atexit = False

    def __next__(self) -> Piece:
        """Waits for the next piece.

        Raises:
            AxcoreError: the request does not fit, its logits are not finite, or the engine failed.
        """
        if self._has_ended:
            raise StopIteration
        piece = self._pieces.get()
        self._has_ended = isinstance(piece, AxcoreError) or piece.finish_reason is not None
        if isinstance(piece, AxcoreError):
            raise piece
        return piece

    def result(self) -> Piece:
        """Waits for the remaining pieces. Returns them as one."""
        return joined(list(self))


def joined(pieces: Iterable[Piece]) -> Piece:
    """Consecutive pieces of a sample as one; empty if there are none."""
    pieces = list(pieces)
    if not pieces:
        return Piece(())
    logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    return Piece(
        ids=tuple(id for piece in pieces for id in piece.ids),
        text="".join(piece.text for piece in pieces),
        logprobs=tuple(each for some in logprobs for each in some) if logprobs else None,
        finish_reason=pieces[-1].finish_reason,
        prompt_logprobs=pieces[0].prompt_logprobs,
        embedding=pieces[-1].embedding,
        num_cached=pieces[0].num_cached,
    )


async def pieces_of(submit: Submit, check: Callable[[], None]) -> AsyncIterator[Piece]:
    """`Stream` for asyncio. A consumer that stops early cancels the sample.

    Args:
        submit: submits the request.
        check: called before in another thread, since it may compile a grammar, which `submit` then finds.
    """
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[Piece | AxcoreError] = asyncio.Queue()

    def deliver(piece: Piece | AxcoreError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nobody waits
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

    await asyncio.to_thread(check)
    cancel = submit(deliver)
    try:
        while True:
            piece = await pieces.get()
            if isinstance(piece, AxcoreError):
                raise piece
            yield piece
            if piece.finish_reason is not None:
                return
    finally:
        cancel()
