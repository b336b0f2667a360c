"""Metrics as TensorBoard scalars."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from axcore.config import AxcoreError, NonNegativeFloat
from axcore.train.callbacks.writers import Writer
from axcore.train.files import os_reason

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter


class TensorBoardWriter(Writer):
    """Writes scalars for TensorBoard, one event per step.

    Events are kept in memory and written every `flush_seconds` and before each checkpoint. Killing the process may
    lose those of the last `flush_seconds`, but never events from before a checkpoint. A rewind starts a new event file
    that makes TensorBoard drop the later steps of earlier files.

    Raises:
        AxcoreError: the folder cannot be written (full disk, permissions).
    """

    class Config(Writer.Config):
        folder: str = "tensorboard"
        """Path inside the run folder."""
        flush_seconds: NonNegativeFloat = 30.0
        """Seconds between two writes to disk. Only a new value triggers one."""

    config: Config

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._flushed_at = 0.0
        self._kept: list[tuple[int, float, Mapping[str, float]]] = []
        """The step, Unix time and values of each event that is not yet written."""
        self._events: EventsWriter | None = None

    @property
    def _events_folder(self) -> pathlib.Path:
        return self.folder / self.config.folder

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # Encoding an event here would take 0.2 ms of each step, since XLA uses all cores. In a batch it takes 0.04 ms.
        now = time.time()
        self._kept.append((step, now, values))
        if now - self._flushed_at >= self.config.flush_seconds:
            self.flush()

    def rewind(self, step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self.close()
        if not any(self._events_folder.glob("*.tfevents.*")):
            return
        try:
            start = SessionLog(status=SessionLog.START)
            self._open().write_event(Event(wall_time=time.time(), step=step + 1, session_log=start))
        except OSError as error:
            raise self._failed(error) from error
        self.flush()

    def flush(self) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        self._flushed_at = time.time()
        kept, self._kept = self._kept, []
        try:
            for step, moment, values in kept:
                scalars = [Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
                self._open().write_event(Event(wall_time=moment, step=int(step), summary=Summary(value=scalars)))
            if self._events is not None:
                self._events.flush()
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        try:
            self.flush()
        finally:
            events, self._events = self._events, None
            if events is not None:
                try:
                    events.close()
                except OSError as error:
                    raise self._failed(error) from error

    def _open(self) -> EventsWriter:
        # Not SummaryWriter: a full disk kills its thread, and its queue then blocks the train loop forever.
        from tensorboardX.event_file_writer import EventsWriter

        if self._events is None:
            self._events_folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads files in name order, and tensorboardX's timestamp in the name has only whole seconds.
            suffix = f".{time.time_ns()}"
            self._events = EventsWriter(str(self._events_folder / "events"), suffix)
        return self._events

    def _failed(self, error: OSError) -> AxcoreError:
        return AxcoreError(f"cannot write TensorBoard events to {self._events_folder}: {os_reason(error)}")
