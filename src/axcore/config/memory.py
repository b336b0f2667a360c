"""Sizes in bytes, and the error for arrays and programs that do not fit in memory."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from axcore.config.errors import AxcoreError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_REFUSAL = re.compile(r"RESOURCE_EXHAUSTED: [^\n]*(?:out of memory|failed to allocate)[^\n]*", re.IGNORECASE)
"""XLA also reports other resources, such as a full disk, as exhausted."""
_ALLOCATION = re.compile(r"allocat\w+ (?:request for )?([\d.]+) ?([KMGT]?)i?B", re.IGNORECASE)
_PROGRAM = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)")
"""The message of libtpu 0.0.52. Its figure has the arguments and outputs, too, although it names only temporaries."""


class OutOfMemory(AxcoreError):
    """Arrays or a program do not fit in the memory of a device or of the host.

    Args:
        what: what does not fit.
        advice: what to do, without a period.
        reason: the line of the error of XLA or Python that says so.

    Attributes:
        required: bytes of the array, or of the whole program if `available` is known; None: not known.
        available: bytes that the compiler allows a program on a device; None: not known.
    """

    required: int | None = None
    available: int | None = None

    def __init__(self, what: str, advice: str, reason: str):
        self.reason, sizes = reason, ""
        if found := _PROGRAM.search(reason):
            self.required, self.available = _bytes(found[1], found[2]), _bytes(found[3], found[4])
            sizes = f": {size(self.required)} required, {size(self.available)} available"
        elif found := _ALLOCATION.search(reason):
            self.required = _bytes(found[1], found[2])
            sizes = f": an array or a program requires {size(self.required)}"
        super().__init__(f"there is not enough memory for {what}{sizes}. {advice} ({reason})")


@contextlib.contextmanager
def allocating(what: str, advice: str) -> Iterator[None]:
    """Creates arrays, or compiles or runs a program, with a clear error if memory does not suffice.

    Args:
        what, advice: see `OutOfMemory`. They replace those of such an error of an inner block.

    Raises:
        OutOfMemory: XLA or Python cannot allocate memory. Other errors stay as they are.
    """
    try:
        yield
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise OutOfMemory(what, advice, reason) from error


def size(count: float, digits: int = 1) -> str:
    """Formats a number of bytes, as in `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.{digits}f} {unit}"
        count /= 1024
    return f"{count:.{digits}f} TiB"


def _reason(error: Exception) -> str | None:
    """The line that says that memory does not suffice; None for other errors."""
    if isinstance(error, OutOfMemory):
        return error.reason
    if isinstance(error, MemoryError):
        return f"MemoryError: {error}".splitlines()[0].removesuffix(": ")
    found = _REFUSAL.search(str(error))
    return None if found is None else found[0]


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit.upper()])
