"""Where text comes from: documents, split once and for all into training and validation."""

from __future__ import annotations

import abc
import collections
import dataclasses
import enum
import fnmatch
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from axcore import config


@dataclasses.dataclass(frozen=True)
class Document:
    """One text and the name that errors call it by."""

    name: str
    content: bytes


class Skip(enum.StrEnum):
    """Why a file that matches is left out."""

    DUPLICATE = "duplicate"
    EMPTY = "empty"
    NOT_TEXT = "not text"
    TOO_LARGE = "too large"
    UNREADABLE = "unreadable"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """All documents of a source, each half in a fixed order."""

    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    skipped: Mapping[Skip, int]
    """How many files were left out, for each reason that occurred."""


class TextSource(config.Configurable, abc.ABC):
    """Base of what gives a `TextInput` its documents."""

    class Config(config.Config):
        """Options that every source has: none."""

    @abc.abstractmethod
    def read(self) -> Corpus:
        """All documents: the same in the same order in every process, with neither half empty."""


class TextFiles(TextSource):
    """The text files below a folder, a document each.

    A file belongs to validation or training by a hash of its path below the folder, so the split is the same
    on every machine and adding a file moves no other. A file whose content was seen under an earlier path is
    skipped: a copy could otherwise be trained on and validated with. Links are followed, each folder once.
    """

    class Config(TextSource.Config):
        """Which files to read. Patterns match paths below the folder: `*` within a name, `**` any folders."""

        folder: str = config.REQUIRED
        """The folder; `~` is the home directory."""
        patterns: tuple[str, ...] = ("**/*.txt",)
        """A file must match one of these."""
        exclude: tuple[str, ...] = ()
        """A file or a whole folder that matches one of these is left out."""
        max_file_bytes: int | None = None
        """Larger files are skipped."""
        validation_percent: float = 2.0
        """The share of the files that are for validation, above 0 and below 100."""

    def __init__(self, cfg: TextFiles.Config):
        """
        Raises:
            ConfigError: `validation_percent` is out of range.
        """
        if not 0 < cfg.validation_percent < 100:
            raise config.ConfigError(
                f"{type(self).__name__}.validation_percent must lie between 0 and 100, not {cfg.validation_percent}"
            )
        self.cfg = cfg

    def folder(self) -> Path:
        """The folder to read. A subclass may find it in its own way."""
        return Path(self.cfg.folder).expanduser()

    def is_validation(self, name: str) -> bool:
        """Whether the file with this path below the folder is for validation."""
        digest = hashlib.sha256(os.fsencode(name)).digest()
        return int.from_bytes(digest[:8], "big") < self.cfg.validation_percent / 100 * 2**64

    def read(self) -> Corpus:
        """Reads every file that matches, in the order of their paths.

        Raises:
            ConfigError: the folder is missing or a file, no text is in it, or all of it fell into one half.
        """
        folder = self.folder()
        if not folder.is_dir():
            problem = "is a file, not a folder" if folder.exists() else "does not exist"
            raise config.ConfigError(f"{type(self).__name__}.folder: {str(folder)!r} {problem}")
        skipped: collections.Counter[Skip] = collections.Counter()
        train: list[Document] = []
        validation: list[Document] = []
        seen: set[bytes] = set()
        for name in sorted(self._names(folder, skipped)):
            content = self._read_text(folder / name, seen)
            if isinstance(content, bytes):
                half = validation if self.is_validation(name) else train
                half.append(Document(name, content))
            else:
                skipped[content] += 1
        self._check(folder, len(train), len(validation), skipped)
        return Corpus(tuple(train), tuple(validation), dict(skipped))

    def _names(self, folder: Path, skipped: collections.Counter[Skip]) -> Iterator[str]:
        """Paths below the folder of all files that match; counts folders that cannot be listed."""
        seen: set[tuple[int, int]] = set()
        unreadable = [Skip.UNREADABLE]
        walk = os.walk(folder, followlinks=True, onerror=lambda _: skipped.update(unreadable))
        for parent, folders, files in walk:
            status = os.stat(parent)
            if (status.st_dev, status.st_ino) in seen:  # a link to where we have been, maybe a loop
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            below = Path(parent).relative_to(folder)
            folders[:] = sorted(name for name in folders if not _matches_any(below / name, self.cfg.exclude))
            for name in files:
                path = below / name
                if _matches_any(path, self.cfg.patterns) and not _matches_any(path, self.cfg.exclude):
                    yield path.as_posix()

    def _read_text(self, path: Path, seen: set[bytes]) -> bytes | Skip:
        try:
            if not path.is_file():  # a dangling link; a pipe, which would block
                return Skip.UNREADABLE
            if self.cfg.max_file_bytes is not None and path.stat().st_size > self.cfg.max_file_bytes:
                return Skip.TOO_LARGE
            content = path.read_bytes()
        except OSError:
            return Skip.UNREADABLE
        if not content:
            return Skip.EMPTY
        if b"\0" in content:
            return Skip.NOT_TEXT
        digest = hashlib.sha256(content).digest()
        if digest in seen:
            return Skip.DUPLICATE
        seen.add(digest)
        return content

    def _check(self, folder: Path, train: int, validation: int, skipped: Mapping[Skip, int]) -> None:
        name, percent = type(self).__name__, self.cfg.validation_percent
        if not train and not validation:
            left_out = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
            raise config.ConfigError(
                f"{name}.folder: no text in {str(folder)!r}: "
                + (f"all that matches was skipped ({left_out})" if skipped else "no file matches")
                + f"; patterns={self.cfg.patterns!r}, exclude={self.cfg.exclude!r}"
            )
        if not train or not validation:
            full, empty = ("training", "validation") if train else ("validation", "training")
            raise config.ConfigError(
                f"{name}: of the {train + validation} files in {str(folder)!r} all fell into {full} and none "
                f"into {empty} (a hash of its path places each file); {'raise' if train else 'lower'} "
                f"validation_percent={percent}, or cut the text into more files"
            )


def _matches_any(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(_matches(path.parts, tuple(pattern.split("/"))) for pattern in patterns)


def _matches(path: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """`PurePath.full_match`, which Python 3.12 has not."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return _matches(path, pattern[1:]) or (bool(path) and _matches(path[1:], pattern))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])
