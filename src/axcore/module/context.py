"""The invocation context: a stack of frames that says where in the module tree a call is and collects what it reports.

The context points to modules; a module never holds a context. Code that is not a Layer (an optax transformation, a
custom_vjp rule, a kernel) may call `current()` too.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from axcore.config import AxcoreError, matches
from axcore.module.collections import Collections, Kind, LossSum, Reduce, Summary, histogram
from axcore.module.rngs import fold


class ContextError(AxcoreError):
    """A layer asked the invocation context for something that it cannot give. The message names the layer."""


@dataclasses.dataclass
class Frame:
    """One call of one layer.

    `name` is the segment below the parent's path; a traced index stands for a layer of a scanned stack. Keys are
    derived anew at each use: a cached one could be a tracer of an inner trace.
    """

    module: nnx.Module | None
    names: tuple[str | jax.Array, ...]
    parent: Frame | None
    root_key: jax.Array | None
    training: bool
    collections: Collections | None
    captured: tuple[str, ...] = ()
    """Path patterns of the outputs that somebody wants."""
    salt: jax.Array | int | None = None
    """Folded into the key but no part of the path: tells mapped examples, loop rounds and repeated calls apart."""
    drawn: dict[str, int] = dataclasses.field(default_factory=dict)
    calls: dict[tuple[str, ...], int] = dataclasses.field(default_factory=dict)
    """How often this layer called each of its children so far."""
    shared: ChainMap[str, Any] = dataclasses.field(default_factory=ChainMap)
    """What layers handed to later ones. The body of a transform reads it, and adds to a map of its own."""

    @property
    def path(self) -> str:
        above = self.parent.path if self.parent else ""
        own = ".".join(name if isinstance(name, str) else "*" for name in self.names)
        return ".".join(part for part in (above, own) if part)

    @property
    def key(self) -> jax.Array | None:
        key = self.root_key if self.root_key is not None else (self.parent.key if self.parent else None)
        if key is not None:
            for name in self.names:
                key = fold(key, name)
            if self.salt is not None:
                key = fold(key, self.salt)
        return key

    def rng(self, stream: str) -> jax.Array:
        """A fresh key of the named stream. The n-th draw of a stream in one call is always the same."""
        key = self.key
        if key is None:
            raise ContextError(
                f"{self.describe()} drew from the PRNG stream {stream!r}, but the call was given no key; "
                f"run it through axcore.invoke(module, ..., key=...)"
            )
        drawn = self.drawn[stream] = self.drawn.get(stream, -1) + 1
        key = fold(key, stream)
        return fold(key, drawn) if drawn else key

    def add_summary(self, name: str, value: Any, reduce: Reduce = Reduce.MEAN, kind: Kind = Kind.SCALAR) -> None:
        """Reports a value to whoever called `invoke`; without one there is nobody to tell, and that is fine."""
        if self.collections is not None:
            value = histogram(value) if kind is Kind.HISTOGRAM else jax.numpy.asarray(value)
            self._record(self.collections.summaries, name, Summary(value, kind, reduce))

    def take(self, name: str) -> Any:
        """What was shared last under this name."""
        if name not in self.shared:
            raise ContextError(
                f"{self.describe()} takes {name!r}, which no layer before it has shared (a value shared in a scan "
                f"or another transform except remat stays inside). Shared: {', '.join(self.shared) or 'nothing'}"
            )
        return self.shared[name]

    def add_output(self, name: str, value: Any) -> None:
        """Hands out a value for inspection, if `invoke(capture=...)` asked for it by a pattern."""
        path = self.below(name)
        if self.collections is not None and any(matches(pattern, path) for pattern in self.captured):
            self._record(self.collections.outputs, name, value)

    def add_result(self, value: Any) -> None:
        """Hands out what the layer returns, if its own path is captured; of several calls, the last."""
        if self.collections is not None and any(matches(pattern, self.path) for pattern in self.captured):
            self.collections.outputs[self.path] = value

    def add_loss(self, name: str, total: Any, count: Any, weight: float = 1.0) -> None:
        """Adds `weight * total / count` to the objective. Requires an `invoke`, since losing a loss changes training.

        Args:
            total: a scalar, the sum of the loss over tokens, rows or other units.
            count: a scalar, the number of those units. It must not depend on parameters. Totals and counts of examples,
                devices and microbatches are added before the division.
            weight: a Python number.
        """
        if self.collections is None:
            raise ContextError(
                f"{self.describe()} adds the loss {name!r}, but nobody collects losses; "
                f"run it through axcore.invoke(module, ...)"
            )
        total, count = (jax.numpy.asarray(each, jax.numpy.float32) for each in (total, count))
        self._record(self.collections.losses, name, LossSum(total, count, float(weight)))

    def absorb(self, inner: Collections | None) -> None:
        """Adds what the body of a transform reported; its frames carried full paths already."""
        if inner is None or self.collections is None:
            return
        for kind in ("summaries", "losses", "outputs"):
            mine, theirs = getattr(self.collections, kind), getattr(inner, kind)
            for path in theirs:
                if path in mine:
                    raise ContextError(f"{path} is reported twice in one call of {self.describe()}")
            mine.update(theirs)

    def repeated(self, names: tuple[str, ...]) -> int | None:
        """None for the first call of a child; then 1, 2, ... to tell the draws of its calls apart."""
        count = self.calls[names] = self.calls.get(names, -1) + 1
        return count or None

    def below(self, name: str) -> str:
        """The path of something of this name in this frame."""
        return f"{self.path}.{name}" if self.path else name

    def _record(self, entries: dict[str, Any], name: str, value: Any) -> None:
        path = self.below(name)
        if path in entries:
            raise ContextError(f"{self.describe()} reports {name!r} twice in one call")
        entries[path] = value

    def describe(self) -> str:
        kind = type(self.module).__name__ if self.module is not None else "code outside any layer"
        return f"{self.path} ({kind})" if self.path else kind


_stack: contextvars.ContextVar[tuple[Frame, ...]] = contextvars.ContextVar("axcore_frames", default=())


def current() -> Frame:
    """The innermost frame.

    Raises:
        ContextError: no layer is being called.
    """
    stack = _stack.get()
    if not stack:
        raise ContextError("there is no invocation context here; call the module through axcore.invoke")
    return stack[-1]


def layer_index() -> tuple[jax.Array, ...]:
    """The index of the current layer in each enclosing scanned stack, outermost first."""
    index: list[jax.Array] = []
    frame = _stack.get()[-1] if _stack.get() else None
    while frame is not None:
        index += [name for name in reversed(frame.names) if not isinstance(name, str)]
        frame = frame.parent
    return tuple(reversed(index))


@contextlib.contextmanager
def pushed(frame: Frame) -> Iterator[Frame]:
    token = _stack.set((*_stack.get(), frame))
    try:
        yield frame
    finally:
        _stack.reset(token)


@contextlib.contextmanager
def root(
    module: nnx.Module | None,
    *,
    key: jax.Array | None,
    training: bool,
    collect: bool = True,
    captured: tuple[str, ...] = (),
    names: tuple[str, ...] = (),
) -> Iterator[Frame]:
    """A fresh stack for one call, whatever was on it before."""
    token = _stack.set(())
    try:
        collections = Collections() if collect else None
        with pushed(Frame(module, names, None, key, training, collections, captured)) as frame:
            yield frame
    finally:
        _stack.reset(token)


@contextlib.contextmanager
def inside(
    parent: Frame, module: nnx.Module, names: tuple[str | jax.Array, ...], salt: jax.Array | int | None = None
) -> Iterator[Frame]:
    """A frame for the body of a transform, with collections of its own that the transform hands back as outputs."""
    collections = None if parent.collections is None else Collections()
    # In the caller's own frame draws go on where they were, or a draw inside would repeat one outside.
    drawn = parent.drawn if not names else {}
    frame = Frame(module, names, parent, None, parent.training, collections, parent.captured, salt, drawn)
    frame.shared = parent.shared.new_child()
    with pushed(frame):
        yield frame


@contextlib.contextmanager
def entered(module: nnx.Module) -> Iterator[Frame]:
    """The frame of a call of `module`: a child of the nearest frame whose module holds it."""
    stack = _stack.get()
    if not stack:
        with root(module, key=None, training=False, collect=False) as frame:
            yield frame
        return
    if stack[-1].module is module:  # super().__call__, or a transform that pushed the frame already
        yield stack[-1]
        return
    for holder in reversed(stack):
        names = locate(holder.module, module) if holder.module is not None else None
        if names is not None:
            top = stack[-1]
            frame = Frame(module, names, holder, None, top.training, top.collections, top.captured)
            frame.salt, frame.shared = holder.repeated(names), top.shared
            with pushed(frame):
                yield frame
            return
    raise ContextError(
        f"{type(module).__name__} was called inside {stack[-1].describe()}, which does not hold it; store it as an "
        f"attribute, or run it through a transform of axcore.module (a copy made by nnx.merge is not the child)"
    )


def locate(holder: Any, wanted: nnx.Module) -> tuple[str, ...] | None:
    """The names that lead from a module to one that it holds, through containers and stock modules."""
    from axcore.module.layer import Layer

    nested = []
    for name, value in _items(holder):
        if value is wanted:
            return (name,)
        if isinstance(value, nnx.Module | tuple | list | Mapping) and not isinstance(value, Layer):
            nested.append((name, value))
    for name, value in nested:
        below = locate(value, wanted)
        if below is not None:
            return (name, *below)
    return None


def _items(holder: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(holder, nnx.List | tuple | list):
        return ((str(index), item) for index, item in enumerate(holder))
    entries = holder if isinstance(holder, Mapping) else vars(holder)
    return ((str(name), item) for name, item in entries.items())
