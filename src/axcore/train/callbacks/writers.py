"""Metrics of a run, written as they come: one JSON object a line, and TensorBoard scalars."""

from __future__ import annotations

import abc
import json
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import axcore.config
from axcore.config import AxcoreError, Configurable
from axcore.train.files import os_reason, write_bytes

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Writer(Configurable, abc.ABC):
    """Where a run's metrics go. Built as `cfg.build(folder)` with the run folder, on one process only.

    Building one touches no file, so that a reader may build it too.
    """

    class Config(axcore.config.Config):
        """Subclasses add what they need."""

    @abc.abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Records values of one step. Cheap: it is called in the train loop."""

    @abc.abstractmethod
    def rewind(self, step: int) -> None:
        """Forgets everything after `step`: the run resumes there and will write those steps again."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Makes all that was written survive a power cut. The trainer calls it with every checkpoint."""

    @abc.abstractmethod
    def close(self) -> None:
        """Flushes and lets go of the files."""


class JsonlWriter(Writer):
    """One JSON object a line: `{"step": 3, "time": 1700000000.5, "loss": 2.25}`; `time` is Unix time in
    seconds.

    A finite float is written in the shortest form that reads back bit for bit. NaN and the infinities, which
    JSON has not, are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`. Each line is handed to the
    operating system as it is written (some microseconds), so killing the process loses none.

    Raises:
        AxcoreError: the file cannot be written (full disk, permissions), or a value is named `step` or
            `time`.
    """

    class Config(Writer.Config):
        file: str = "metrics.jsonl"
        """Path inside the run folder."""

    def __init__(self, cfg: Config, folder: pathlib.Path):
        self.path = folder / cfg.file
        self._descriptor: int | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if "step" in values or "time" in values:
            raise AxcoreError("a metric cannot be named 'step' or 'time': those are the line's own")
        record: dict[str, Any] = {"step": int(step), "time": time.time()}
        for name, value in values.items():
            record[name] = _number(value)
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        try:
            if self._descriptor is None:
                self._descriptor = _open_to_append(self.path)
            _append(self._descriptor, line)
        except OSError as error:
            raise self._failed(error) from error

    def rewind(self, step: int) -> None:
        self.close()
        if not self.path.exists():
            return
        try:
            lines = self.path.read_bytes().splitlines(keepends=True)
        except OSError as error:
            raise self._failed(error) from error
        kept = [line for line in lines if (record := _parse(line)) is not None and record["step"] <= step]
        if len(kept) != len(lines):
            write_bytes(self.path, b"".join(kept))

    def flush(self) -> None:
        if self._descriptor is not None:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise self._failed(error) from error

    def close(self) -> None:
        if self._descriptor is not None:
            try:
                self.flush()
            finally:
                os.close(self._descriptor)
                self._descriptor = None

    def _failed(self, error: OSError) -> AxcoreError:
        return AxcoreError(f"cannot write metrics to {self.path}: {os_reason(error)}")


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a `JsonlWriter` file, in order; non-finite values are floats again.

    A last line that a crash tore is left out.

    Raises:
        AxcoreError: another line is not a record; names it.
    """
    lines = pathlib.Path(path).read_bytes().splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, 1):
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif number < len(lines) or line.endswith(b"\n"):
            raise AxcoreError(f"{path}, line {number}, is not a metrics record: {line[:80]!r}")
    return records


class TensorBoardWriter(Writer):
    """Scalars for TensorBoard, one event a step.

    A rewind starts a new event file that tells TensorBoard to drop the steps after it. What was written in
    the last `flush_seconds` may be lost when the process is killed; what preceded a checkpoint never is.

    Raises:
        AxcoreError: the folder cannot be written (full disk, permissions).
    """

    class Config(Writer.Config):
        folder: str = "tensorboard"
        """Path inside the run folder."""
        flush_seconds: float = 30.0
        """Longest time, in seconds, between a value and the disk, as long as values keep coming."""

    def __init__(self, cfg: Config, folder: pathlib.Path):
        self.folder = folder / cfg.folder
        self._flush_seconds = cfg.flush_seconds
        self._flushed_at = 0.0
        self._events: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        now = time.time()
        scalars = [Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        try:
            if self._events is None:
                self._open()
            self._events.write_event(Event(wall_time=now, step=int(step), summary=Summary(value=scalars)))
        except OSError as error:
            raise self._failed(error) from error
        if now - self._flushed_at >= self._flush_seconds:
            self.flush()

    def rewind(self, step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self.close()
        if not any(self.folder.glob("*.tfevents.*")):
            return
        try:
            self._open()
            start = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(wall_time=time.time(), step=step + 1, session_log=start))
        except OSError as error:
            raise self._failed(error) from error
        self.flush()

    def flush(self) -> None:
        if self._events is not None:
            self._flushed_at = time.time()
            try:
                self._events.flush()
            except OSError as error:
                raise self._failed(error) from error

    def close(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            try:
                events.close()
            except OSError as error:
                raise self._failed(error) from error

    def _open(self) -> None:
        # Not SummaryWriter: its thread dies of a full disk, and the queue to it then blocks the train loop
        # for good.
        from tensorboardX.event_file_writer import EventsWriter

        self.folder.mkdir(parents=True, exist_ok=True)
        suffix = f".{time.time_ns()}"  # the name has seconds, and TensorBoard reads files in the order of names
        self._events = EventsWriter(str(self.folder / "events"), suffix)

    def _failed(self, error: OSError) -> AxcoreError:
        return AxcoreError(f"cannot write TensorBoard events to {self.folder}: {os_reason(error)}")


def _number(value: Any) -> float | int | str:
    if type(value) is int:
        return value
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record of a whole line, or None."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return {name: _NON_FINITE.get(v, v) if isinstance(v, str) else v for name, v in record.items()}


def _open_to_append(path: pathlib.Path) -> int:
    """Opens the file at its end, less a last line that a crash tore."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
    end = size = os.fstat(descriptor).st_size
    for start, chunk in _chunks_backwards(descriptor, size):
        newline = chunk.rfind(b"\n")
        end = start + newline + 1
        if newline >= 0:
            break
    if end != size:
        os.ftruncate(descriptor, end)
    return descriptor


def _chunks_backwards(descriptor: int, size: int, length: int = 4096) -> Iterator[tuple[int, bytes]]:
    while size > 0:
        start = max(0, size - length)
        os.lseek(descriptor, start, os.SEEK_SET)
        yield start, os.read(descriptor, size - start)
        size = start


def _append(descriptor: int, line: bytes) -> None:
    """Writes a whole line, or, when the disk is full, nothing."""
    done = os.write(descriptor, line)
    while done < len(line):
        try:
            done += os.write(descriptor, line[done:])
        except OSError:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - done)
            raise
