"""The edit history of config nodes: who set each field, and on which line of code."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import os
import sys
import traceback
from collections.abc import Iterable, Iterator

_PACKAGE = os.path.dirname(__file__) + os.sep
_AXCORE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_actors: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("axcore_actors", default=())


@dataclasses.dataclass(frozen=True)
class Event:
    """One edit of one node.

    Attributes:
        actor: The active recipe, modifier, plugin or override, outermost first; `python` if none is active.
        action: The kind of edit, as in `set theta`.
        names: The fields that were set.
        where: `file:line` of the code that made the edit.
    """

    actor: str
    action: str
    names: tuple[str, ...]
    where: str
    order: int = dataclasses.field(default_factory=itertools.count().__next__, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.actor}: {self.action} ({self.where})"


class History(tuple[Event, ...]):
    """Events, oldest first. Its text has one line per event."""

    def __new__(cls, events: Iterable[Event]) -> History:
        return super().__new__(cls, sorted(events, key=lambda each: each.order))

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "as declared"


def event(action: str, *names: str) -> Event:
    """An event of the current actor, at the nearest calling line outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, "<")):
        frame = frame.f_back
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return Event(" > ".join(_actors.get()) or "python", action, names, where)


def raised_at(error: BaseException) -> str:
    """`file:line` of the innermost code outside axcore through which an error passed; of axcore if there is none."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    outside = [each for each in lines if not each[0].startswith((_AXCORE, "<"))]
    return "{}:{}".format(*(outside or lines)[-1])


@contextlib.contextmanager
def acting(actor: str) -> Iterator[None]:
    """Attributes the edits that the block makes to `actor`."""
    token = _actors.set((*_actors.get(), actor))
    try:
        yield
    finally:
        _actors.reset(token)
