"""Chooses the first implementation in an order that supports a call, such as a kernel, and records the choices."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from axcore.config import ConfigError


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that a call runs.

    Attributes:
        path: path of the slot that holds the implementations; the layer index in a scanned stack is `*`.
        requests: the requests that it must support: the different calls on one device, such as several with some
            strategies of context parallelism.
        chosen: the chosen implementation; None if none supports all requests.
        refused: those tried before it, each with the reason why it does not support one of the requests.
        failure: the start of the error message if none is chosen.
        remedy: its end: what to do.
        settings: the measured or default settings of the chosen one for each request, if it has any.
    """

    path: str
    requests: tuple[Any, ...]  # Any: the requests of different slots have nothing in common but their text
    chosen: Any | None  # Any: neither have the implementations
    refused: tuple[tuple[Any, str], ...]
    failure: str
    remedy: str
    settings: tuple[Mapping[str, int], ...] = ()

    @property
    def described(self) -> str:
        """The requests as text."""
        return " and ".join(dict.fromkeys(map(str, self.requests)))

    def problem(self) -> str:
        """An error message if none is chosen, with the recipe, rule or feature that set each implementation."""
        if self.chosen is not None:
            return ""
        reasons = "; ".join(f"{type(each).__name__}: {reason}{_origin(each)}" for each, reason in self.refused)
        return f"{self.path}: {self.failure} ({self.described}). {reasons or 'order is empty'}. {self.remedy}"


def _origin(implementation: Any) -> str:  # Any: a config, or a layer with a config
    """` (set by ...)`: the outermost recipe, rule or feature that put an implementation into the config."""
    history = getattr(implementation, "config", implementation).history()
    actor = next((event.actor for event in history if event.action == "made"), "python")
    return "" if actor == "python" else f" (set by {actor.partition(' > ')[0]})"


_choices: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar("axcore_choices", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Choice]]:
    """Records the choice of every call traced inside the block.

    The implementations do not run and results are zeros, so use it with `jax.eval_shape` only.
    """
    found: list[Choice] = []
    token = _choices.set(found)
    try:
        yield found
    finally:
        _choices.reset(token)


def is_recording() -> bool:
    """Whether choices are only recorded, and implementations must not run."""
    return _choices.get() is not None


def choose[I](
    path: str,
    order: Iterable[I],
    requests: Callable[[I], tuple[Any, ...]],  # Any: see `Choice`
    refusal: Callable[[I, tuple[Any, ...]], str | None],
    *,
    failure: str,
    remedy: str,
    settings: Callable[[I, tuple[Any, ...]], tuple[Mapping[str, int], ...]] = lambda *_: (),
) -> Choice:
    """Chooses the first implementation of an order that supports all requests of a call. There is no other fallback.

    Args:
        requests: the requests that an implementation must support.
        refusal: why an implementation does not support one of its requests; None if it supports all.
        settings: the settings of the chosen one for each request.
        path, failure, remedy: see `Choice`.

    Raises:
        ConfigError: none supports the call, and choices are not recorded. The message has the path, the requests and
            the reasons.
    """
    refused: list[tuple[I, str]] = []
    chosen: I | None = None
    asked: tuple[Any, ...] = ()
    found: tuple[Mapping[str, int], ...] = ()
    for each in order:
        asked = requests(each)
        if (reason := refusal(each, asked)) is None:
            chosen, found = each, settings(each, asked)
            break
        refused.append((each, reason))
    choice = Choice(path, asked, chosen, tuple(refused), failure, remedy, found)
    if (choices := _choices.get()) is not None:
        choices.append(choice)
    elif chosen is None:
        raise ConfigError(choice.problem())
    return choice
