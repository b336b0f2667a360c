"""The text files below a folder."""

from __future__ import annotations

import collections
import dataclasses
import enum
import fnmatch
import functools
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from axcore import config
from axcore.train.data.pieces import Pieces, Span, line_start
from axcore.train.data.source import Document, Source, Split
from axcore.train.files import expanded, os_reason

if TYPE_CHECKING:
    import grain

_READ_BYTES = 2**20
_NAMED = 5


class Skip(enum.StrEnum):
    """The reason that a matching file is skipped."""

    DUPLICATE = "duplicate"
    EMPTY = "empty"
    NOT_TEXT = "not text"
    TOO_LARGE = "too large"
    UNREADABLE = "unreadable"


@dataclasses.dataclass(frozen=True)
class FileIndex:
    """The files of each split, sorted by path."""

    folder: Path
    files: Mapping[Split, tuple[Span, ...]]
    skipped: Mapping[Skip, int]
    """Number of skipped files, by reason."""
    digest: str
    """Digest that changes when a training file changes."""


class TextFiles(Source):
    """The text files below a folder, one document each.

    A hash of the path below the folder assigns a file to validation or training, so the split is the same on every
    machine, and adding a file does not move others. A single file is divided instead: its end, beginning at the start
    of a line, is for validation. The index contains paths and sizes; contents are read on demand. Links are followed,
    but each folder is visited only once.
    """

    class Config(Source.Config):
        """Selects files. Patterns match paths below the folder: `*` matches within a name, `**` any folders."""

        layout_fields = ("folder",)  # `Input.identity` compares the text itself
        folder: str = config.REQUIRED
        """The folder; `~` is the home directory."""
        patterns: tuple[str, ...] = ("**/*.txt",)
        """Patterns of files to include."""
        exclude: tuple[str, ...] = ()
        """Patterns of files or folders to exclude."""
        max_file_bytes: config.NonNegativeInt | None = None
        """Larger files are skipped."""
        validation_percent: Annotated[float, config.Range(above=0, below=100)] = 2.0
        """Percentage of files, or of the bytes of a single file, for validation, above 0 and below 100."""
        check_content: bool = True
        """Read every file once at the start, to skip files that are not text (they contain a zero byte) and duplicates,
        which could otherwise be in both training and validation. False starts faster, but a change of a file is
        detected only if it changes the size."""
        allow_unreadable: bool = False
        """Skip files and folders that cannot be read, instead of raising an error."""

    config: Config

    def __init__(self, cfg: Config):
        """
        Raises:
            ConfigError: `max_file_bytes` or `validation_percent` is out of range.
        """
        self.config = cfg

    def folder(self) -> Path:
        """The folder to read. Subclasses may override it."""
        return expanded(self.config.folder, "folder")

    def is_validation(self, name: str) -> bool:
        """Whether the file with this path below the folder is for validation."""
        digest = hashlib.sha256(os.fsencode(name)).digest()
        return int.from_bytes(digest[:8], "big") < self.config.validation_percent / 100 * 2**64

    def documents(self, split: Split, piece_bytes: int) -> grain.MapDataset[Document]:
        """See `Source.documents`."""
        import grain  # slow to import, so not at the top of a module with configs

        index = self.index
        return grain.MapDataset.source(Pieces(index.folder, index.files[split], piece_bytes))

    def left_out(self) -> Mapping[str, int]:
        """See `Source.left_out`."""
        return {reason: self.index.skipped[reason] for reason in Skip if reason in self.index.skipped}

    def fingerprint(self, piece_bytes: int) -> str:
        """See `Source.fingerprint`. Covers every file."""
        return self.index.digest

    @functools.cached_property
    def index(self) -> FileIndex:
        """The files to read, listed on first use.

        Raises:
            ConfigError: the folder is missing, not a folder, or contains no text; a file cannot be read; or a split is
                empty.
        """
        folder = self.folder()
        if not folder.is_dir():
            problem = "is not a folder" if folder.exists() else "does not exist"
            raise config.ConfigError(f"folder={str(folder)!r} {problem}. Set it to a folder of text files.")
        skipped: collections.Counter[Skip] = collections.Counter()
        unreadable: list[str] = []
        found_files: list[tuple[str, int, bytes]] = []
        seen: set[bytes] = set()
        for name in sorted(self._names(folder, unreadable)):
            try:
                found = self._check_file(folder / name)
            except OSError as error:
                unreadable.append(f"{name} ({os_reason(error)})")
                continue
            if not isinstance(found, Skip) and found[1] and found[1] in seen:
                found = Skip.DUPLICATE
            if isinstance(found, Skip):
                skipped[found] += 1
                continue
            size, digest = found
            seen.add(digest)
            found_files.append((name, size, digest))
        if unreadable:
            self._report_unreadable(folder, unreadable)
            skipped[Skip.UNREADABLE] = len(unreadable)
        files: dict[Split, list[Span]] = {split: [] for split in Split}
        total = hashlib.sha256()
        for name, size, digest in found_files:
            parts = self._parts(folder, name, size, alone=len(found_files) == 1)
            for split, span in parts.items():
                files[split].append(span)
            if Split.TRAIN in parts:
                total.update(os.fsencode(name) + b"\0%d\0" % parts[Split.TRAIN].size + digest)
        index = FileIndex(folder, {split: tuple(spans) for split, spans in files.items()}, skipped, total.hexdigest())
        self._check_splits(index)
        return index

    def _parts(self, folder: Path, name: str, size: int, alone: bool) -> dict[Split, Span]:
        """The part of a file for each split that it belongs to."""
        if not alone:
            return {Split.VALIDATION if self.is_validation(name) else Split.TRAIN: Span(name, 0, size)}
        share = 1 - self.config.validation_percent / 100
        try:
            cut = line_start(folder / name, min(max(1, round(size * share)), size - 1), size - 1)
        except OSError as error:
            raise config.ConfigError(f"cannot read {folder / name}: {os_reason(error)}") from error
        return {Split.TRAIN: Span(name, 0, cut), Split.VALIDATION: Span(name, cut, size - cut)}

    def _names(self, folder: Path, unreadable: list[str]) -> Iterator[str]:
        """Paths below the folder of all matching files. Adds folders that cannot be listed to `unreadable`."""
        seen: set[tuple[int, int]] = set()

        def note(error: OSError) -> None:
            unreadable.append(f"{os.path.relpath(error.filename, folder)} ({os_reason(error)})")

        for parent, folders, files in os.walk(folder, followlinks=True, onerror=note):
            status = os.stat(parent)
            if (status.st_dev, status.st_ino) in seen:  # a link to a folder already visited, maybe a loop
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            below = Path(parent).relative_to(folder)
            folders[:] = sorted(name for name in folders if not _matches_any(below / name, self.config.exclude))
            for name in files:
                path = below / name
                if _matches_any(path, self.config.patterns) and not _matches_any(path, self.config.exclude):
                    yield path.as_posix()

    def _check_file(self, path: Path) -> tuple[int, bytes] | Skip:
        """Size and digest of a file. The digest is empty unless contents are checked."""
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would block
            raise OSError(0, "not a regular file")
        if not status.st_size:
            return Skip.EMPTY
        if self.config.max_file_bytes is not None and status.st_size > self.config.max_file_bytes:
            return Skip.TOO_LARGE
        if not self.config.check_content:
            return status.st_size, b""
        digest, size = hashlib.sha256(), 0
        with path.open("rb", buffering=0) as file:
            while content := file.read(_READ_BYTES):
                if b"\0" in content:
                    return Skip.NOT_TEXT
                digest.update(content)
                size += len(content)
        return size, digest.digest()

    def _report_unreadable(self, folder: Path, unreadable: list[str]) -> None:
        if self.config.allow_unreadable:
            return
        more = f" and {len(unreadable) - _NAMED} more" if len(unreadable) > _NAMED else ""
        raise config.ConfigError(
            f"cannot read {', '.join(unreadable[:_NAMED])}{more} in {str(folder)!r}. Make them readable, exclude them, "
            f"or set allow_unreadable=True to skip them."
        )

    def _check_splits(self, index: FileIndex) -> None:
        folder, percent = str(index.folder), self.config.validation_percent
        train, validation = (len(index.files[split]) for split in Split)
        if not train and not validation:
            left_out = ", ".join(f"{count} {reason}" for reason, count in index.skipped.items())
            problem = f"all files that match were skipped ({left_out})" if left_out else "no file matches"
            raise config.ConfigError(
                f"no text in folder={folder!r}: {problem}. Change the folder, patterns={self.config.patterns!r} or "
                f"exclude={self.config.exclude!r}."
            )
        if not train or not validation:
            full, empty = ("training", "validation") if train else ("validation", "training")
            advice = "Raise" if train else "Lower"
            raise config.ConfigError(
                f"folder={folder!r}: a hash of its path assigns each file to training or validation, and all "
                f"{train + validation} files are in {full}, but {empty} requires at least one. {advice} "
                f"validation_percent={percent}, or split the text into more files."
            )


def _matches_any(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(_matches(path.parts, tuple(pattern.split("/"))) for pattern in patterns)


def _matches(path: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """`PurePath.full_match`, which Python 3.12 lacks."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return _matches(path, pattern[1:]) or (bool(path) and _matches(path[1:], pattern))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])
