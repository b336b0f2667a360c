"""Documents from a file of JSON objects."""

from __future__ import annotations

import functools
import json
import operator
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, SupportsIndex

import numpy as np
from jaxtyping import Float64, Int64

from axcore import config
from axcore.config import AxcoreError, ConfigError
from axcore.train.data.source import Document, Source, Split
from axcore.train.files import expanded, os_reason

if TYPE_CHECKING:
    import grain

_READ_BYTES = 2**22


class JsonLines(Source):
    """One document per line of a file of JSON objects.

    A hash of the line number assigns a line to validation or training, so appending lines does not move others. The
    index of the lines is a memory-mapped temporary file. Lines are read on demand.
    """

    class Config(Source.Config):
        layout_fields = ("file",)  # `Input.identity` compares the text itself
        file: str = config.REQUIRED
        """The file; `~` is the home directory."""
        field: str = "text"
        """Name of the field that contains the document."""
        validation_percent: Annotated[float, config.Range(above=0, below=100)] = 2.0
        """Percentage of lines for validation, above 0 and below 100."""

    config: Config

    def __init__(self, cfg: Config):
        """
        Raises:
            ConfigError: `validation_percent` is out of range.
        """
        self.config = cfg

    def documents(self, split: Split, piece_bytes: int) -> grain.MapDataset[Document]:
        """See `Source.documents`. A line is never cut."""
        import grain

        return grain.MapDataset.source(_Lines(self._path, self.config.field, self._index[split]))

    @property
    def _path(self) -> Path:
        return expanded(self.config.file, "file")

    @functools.cached_property
    def _index(self) -> dict[Split, Int64[np.ndarray, "lines 3"]]:
        """Number, first byte and length of the lines of each split.

        Raises:
            ConfigError: the file cannot be read, or a split is empty.
        """
        files = {split: tempfile.TemporaryFile() for split in Split}  # noqa: SIM115  (mapped below)

        def add(number: int, starts: Int64[np.ndarray, " lines"], ends: Int64[np.ndarray, " lines"]) -> None:
            lines = np.stack([np.arange(number, number + len(starts)), starts, ends - starts], axis=1)
            lines = lines[lines[:, 2] > 2]  # the others have only a line end, LF or CRLF
            validation = _hash(lines[:, 0]) < self.config.validation_percent / 100
            files[Split.TRAIN].write(lines[~validation].tobytes())
            files[Split.VALIDATION].write(lines[validation].tobytes())

        try:
            number, start, read = 1, 0, 0
            with self._path.open("rb", buffering=0) as file:
                while content := file.read(_READ_BYTES):
                    ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n")) + read + 1
                    read += len(content)
                    if len(ends):
                        add(number, np.concatenate([[start], ends[:-1]]), ends)
                        number, start = number + len(ends), int(ends[-1])
            if read > start:  # the last line has no newline
                add(number, np.array([start]), np.array([read]))
        except OSError as error:
            raise ConfigError(f"file={self.config.file!r} cannot be read: {os_reason(error)}") from error
        index = {}
        for split, lines in files.items():
            if not lines.tell():
                raise ConfigError(
                    f"file={self.config.file!r} has too few lines: with "
                    f"validation_percent={self.config.validation_percent} no line is in {split}. Add lines, or change "
                    f"validation_percent."
                )
            lines.flush()
            index[split] = np.memmap(lines, np.int64, "r").reshape(-1, 3)
        return index


class _Lines:
    """A random-access data source: some lines of a file."""

    def __init__(self, path: Path, field: str, lines: Int64[np.ndarray, "lines 3"]):
        self._path, self._field, self._lines = path, field, lines

    def __len__(self) -> int:
        return len(self._lines)

    def __repr__(self) -> str:
        return f"{len(self)} lines of {self._path}"

    def __getitem__(self, index: SupportsIndex) -> Document:
        """
        Raises:
            AxcoreError: the line cannot be read or is not an object with the field.
        """
        number, start, length = (int(value) for value in self._lines[operator.index(index)])
        name = f"{self._path}:{number}"
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
            try:
                line = os.pread(descriptor, length, start)
            finally:
                os.close(descriptor)
            content = json.loads(line)
        except OSError as error:
            raise AxcoreError(f"cannot read {name}: {os_reason(error)}") from error
        except ValueError as error:
            raise AxcoreError(f"{name} is not valid JSON: {error}. Correct or remove the line.") from error
        if not isinstance(content, dict) or self._field not in content:
            found = f"one with {sorted(content)}" if isinstance(content, dict) else type(content).__name__
            raise AxcoreError(
                f"{name} must be a JSON object with the field {self._field!r}, got {found}. Correct or remove the "
                f"line, or set field."
            )
        text = content[self._field]
        if not isinstance(text, str):
            raise AxcoreError(f"{name}: the field {self._field!r} must be a string, got {type(text).__name__}")
        return Document(name, text.encode(errors="replace"))


def _hash(numbers: Int64[np.ndarray, " lines"]) -> Float64[np.ndarray, " lines"]:
    """A pseudo-random fraction for each number: the finalizer of SplitMix64."""
    bits = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits ^ (bits >> np.uint64(31))) / 2.0**64
