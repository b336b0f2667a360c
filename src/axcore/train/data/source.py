"""Sources of text: documents with random access and a fixed split into training and validation."""

from __future__ import annotations

import abc
import dataclasses
import enum
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from axcore import config

if TYPE_CHECKING:  # grain takes over a second to import
    import grain

_SAMPLE = 256


@dataclasses.dataclass(frozen=True)
class Document:
    """A text, or one piece of a long text."""

    name: str
    """Name for error messages."""
    content: bytes
    starts: bool = True
    """False for a piece that is not the first of its text."""
    ends: bool = True
    """False for a piece that is not the last of its text."""


class Split(enum.StrEnum):
    """The two parts of a source."""

    TRAIN = "train"
    VALIDATION = "validation"


class Source(config.Configurable, abc.ABC):
    """Base class of the sources of a `TextInput`."""

    class Config(config.Config):
        """No common options."""

    def __init__(self, cfg: Config):
        self.config = cfg

    @abc.abstractmethod
    def documents(self, split: Split, piece_bytes: int) -> grain.MapDataset[Document]:
        """The documents of a split, in the same order in every process.

        The dataset reads documents on demand and does not keep them, so memory does not grow with the text.

        Args:
            split: training or validation. A training text must not occur in validation.
            piece_bytes: texts much longer than this should come in consecutive pieces of about this size, so that
                shuffling mixes texts and memory stays bounded. A source of short texts may ignore it.
        """

    def parts(self) -> Mapping[str, tuple[float, Source]]:
        """The sources that this source draws from, by name, each with its share of the training tokens."""
        return {"": (1.0, self)}

    def left_out(self) -> Mapping[str, int]:
        """The number of texts that this source leaves out, by reason. A run prints them."""
        return {}

    def fingerprint(self, piece_bytes: int) -> str:
        """A digest of the training documents, to detect changes.

        The default covers a sample of the documents. Override this method if all of them can be checked cheaply.
        """
        documents = self.documents(Split.TRAIN, piece_bytes)
        digest = hashlib.sha256(str(len(documents)).encode())
        for index in range(0, len(documents), -(-len(documents) // _SAMPLE)):
            if (document := documents[index]) is not None:  # grain's filter leaves None in place of dropped elements
                digest.update(b"%d:" % len(document.content) + document.content)
        return digest.hexdigest()


class LocatedError(config.ConfigError):
    """An error in the config at `path`."""

    def __init__(self, path: str, problem: str):
        super().__init__(f"{path}: {problem}")
        self.path, self.problem = path, problem


@contextmanager
def located(path: str) -> Iterator[None]:
    """Adds the config path to errors of the node at `path`."""
    try:
        yield
    except config.MissingError as error:  # the trainer adds "input"
        raise error.below(path.removeprefix("input").removeprefix(".")) from None
    except LocatedError as error:
        raise LocatedError(f"{path}.{error.path}", error.problem) from error
    except config.ConfigError as error:
        raise LocatedError(path, str(error)) from error
