"""A request that waits for the engine that computes its prompt."""

from __future__ import annotations

import threading
from collections.abc import Callable

from axcore.config import AxcoreError
from axcore.infer.disaggregation.handover import DeliverHandover, Handover
from axcore.infer.requests import Piece
from axcore.infer.streams import Deliver


class PendingHandover:
    """A request whose prompt another engine computes, until it is handed over and continued here.

    Args:
        deliver: receives the pieces.
        resume: continues a handover; see `Engine.resume`.
        pending: contains this object until the prompt is computed.
    """

    def __init__(
        self,
        deliver: Deliver,
        resume: Callable[[Handover, Deliver], Callable[[], None]],
        pending: set[PendingHandover],
    ):
        self._deliver, self._resume, self._pending = deliver, resume, pending
        self._lock, self._is_cancelled = threading.Lock(), False
        self._cancels: list[Callable[[], None]] = []

    def start(self, export: Callable[[DeliverHandover], Callable[[], None]]) -> None:
        """Starts to compute the prompt. For the errors see `Engine.export`."""
        self._pending.add(self)
        try:
            self._cancels.append(export(self._received))
        except BaseException:
            self._pending.discard(self)
            raise

    def cancel(self) -> None:
        """Ends the request, from any thread, wherever it is."""
        with self._lock:
            self._is_cancelled, cancels = True, list(self._cancels)
        for cancel in cancels:
            cancel()

    def _received(self, found: Handover | Piece | AxcoreError) -> None:
        self._pending.discard(self)
        if not isinstance(found, Handover):
            self._deliver(found)
            return
        try:
            cancel = self._resume(found, self._deliver)
        except AxcoreError as error:
            self._deliver(error)
            return
        with self._lock:
            self._cancels.append(cancel)
            is_cancelled = self._is_cancelled
        if is_cancelled:
            cancel()
