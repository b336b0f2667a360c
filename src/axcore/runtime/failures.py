"""Reports the failure of a process to the other processes and to the launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
import traceback

from axcore.config import AxcoreError
from axcore.runtime.cluster import PROCESS_ID
from axcore.runtime.errors import PeerFailed
from axcore.runtime.exit_codes import ExitCode
from axcore.runtime.process_group import ProcessGroup

ERROR_FILE = "AXCORE_ERROR_FILE"
"""Environment variable: the file where a process started by `axcore launch` writes its failure."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """The reason a process ended.

    Attributes:
        index: the index of the process.
        message: the full error message.
        code: the exit code.
        time: Unix time in seconds, by the clock of the process's host.
    """

    index: int
    message: str
    code: int
    time: float

    @classmethod
    def of(cls, error: BaseException, index: int) -> Failure:
        if isinstance(error, AxcoreError):
            return cls(index, str(error), int(error.exit_code), time.time())
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
        where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        return cls(index, f"{type(error).__name__}: {error}{where}", ExitCode.FAILED, time.time())

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Failure:
        return cls(**json.loads(text))

    @property
    def is_cause(self) -> bool:
        """False if the failure is a consequence of another process's failure."""
        return self.code != ExitCode.PEER_FAILED

    @property
    def is_stop(self) -> bool:
        """True if the process stopped after a signal. All processes stop after the same step."""
        return self.code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)

    def as_peer_failure(self, group: ProcessGroup) -> PeerFailed:
        return PeerFailed(f"{group.named(self.index)} failed: {self.message}")


def first(found: list[Failure]) -> Failure | None:
    """The failure that caused the others."""
    # A process killed by a signal takes precedence: the other processes may notice it before the launcher does.
    return min(found, key=lambda each: (not each.is_cause, each.code <= 128, each.time), default=None)


def record(error: BaseException) -> None:
    """Writes the failure for `axcore launch`, if it started this process. Only the first failure is recorded."""
    path = os.environ.get(ERROR_FILE)
    if path:
        with contextlib.suppress(OSError), open(path, "xb") as file:
            file.write(Failure.of(error, int(os.environ.get(PROCESS_ID, "0"))).to_json())


class FailureStore:
    """The failures that the processes of one `watch` have posted, in the shared key-value store."""

    def __init__(self, group: ProcessGroup, number: int):
        self._group, self._key = group, f"axcore/failures/{number}"

    def post(self, failure: Failure) -> None:
        self._group.store.key_value_set_bytes(f"{self._key}/{self._group.index}", failure.to_json(), True)

    def read(self) -> Failure | None:
        """The first failure of another process."""
        posted = [Failure.from_json(value) for _, value in self._group.store.key_value_dir_get_bytes(self._key)]
        return first([each for each in posted if each.index != self._group.index])
