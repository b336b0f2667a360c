"""Metrics as JSON lines, and the base class of callbacks that record metrics."""

from __future__ import annotations

import abc
import json
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from axcore.config import AxcoreError
from axcore.train.callbacks.base import Callback, RunInfo, StepInfo
from axcore.train.files import os_reason, write_bytes

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


Record = dict[str, Any]
"""A line of a metrics file: `step`, `time` and metrics. `Any`, since only the reader knows the types of the metrics."""


class Writer(Callback, abc.ABC):
    """Base class of callbacks that record metrics. Only process 0 builds them.

    Training metrics are named `train/NAME`. Evaluation metrics are prefixed with the name of the evaluator.
    """

    class Config(Callback.Config):
        """Subclasses add their fields."""

    first_process_only = True
    folder: pathlib.Path
    """The run folder."""

    def start(self, run: RunInfo) -> None:
        self.folder = run.folder
        if run.resumed:
            self.rewind(run.step)

    def step(self, info: StepInfo) -> None:
        self.write(info.step, {f"train/{name}": value for name, value in info.metrics.items()})

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.write(step, metrics)

    def checkpoint(self, step: int) -> None:
        self.flush()

    @abc.abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Records values of one step. Must be fast, since the train loop waits for it."""

    @abc.abstractmethod
    def rewind(self, step: int) -> None:
        """Removes everything after `step`, since the resumed run writes those steps again."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Syncs everything written so far to disk. Called before each checkpoint."""


class JsonlWriter(Writer):
    """Writes one JSON object per line: `{"step": 3, "time": 1700000000.5, "train/loss": 2.25}`. `time` is Unix time
    in seconds.

    A finite float is written in the shortest form that round-trips exactly. NaN and the infinities, which JSON lacks,
    become the strings `"NaN"`, `"Infinity"` and `"-Infinity"`. Each line goes to the operating system immediately
    (a few microseconds), so killing the process loses no line.

    Raises:
        AxcoreError: the file cannot be written (full disk, permissions), or a metric is named `step` or `time`.
    """

    class Config(Writer.Config):
        file: str = "metrics.jsonl"
        """Path inside the run folder."""

    config: Config

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._descriptor: int | None = None

    @property
    def path(self) -> pathlib.Path:
        return self.folder / self.config.file

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if "step" in values or "time" in values:
            raise AxcoreError("a metric cannot be named 'step' or 'time', which each line contains. Rename the metric.")
        record: dict[str, float | int | str] = {"step": int(step), "time": time.time()}
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


def read_jsonl(path: str | os.PathLike[str]) -> list[Record]:
    """Reads the records of a `JsonlWriter` file, in order. Non-finite values become floats again.

    Skips an incomplete last line, which a crash leaves behind.

    Raises:
        AxcoreError: any other line is not a record. The message names the line.
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


def _number(value: float) -> float | int | str:
    if type(value) is int:
        return value
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def _parse(line: bytes) -> Record | None:
    """The record of a complete line, or None."""
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
    """Opens the file for appending, after removing an incomplete last line."""
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
    """Writes the whole line, or nothing if the disk is full."""
    done = os.write(descriptor, line)
    while done < len(line):
        try:
            done += os.write(descriptor, line[done:])
        except OSError:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - done)
            raise
