"""The invocation context: a stack of frames that says where in the module tree a call is and collects what it reports.

The context points to modules; a module never holds a context. Code that is not a Layer (an optax transformation, a
custom_vjp rule, a kernel) may call `current()` too.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from axcore.config import AxcoreError
from axcore.module.rngs import fold


class ContextError(AxcoreError):
    """A layer asked the invocation context for something that it cannot give. The message names the layer."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Collections:
    """What the layers of one call reported, by `path.name`.

    A layer that ran in a scanned stack reports under `*`, with a leading axis over the layers: `decoder.layers.*.norm`.
    `labelled` spells such entries out.
    """

    summaries: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    losses: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

    def absorb(self, inner: Collections) -> None:
        """Adds what the body of a transform reported; its frames carried full paths already."""
        self.summaries.update(inner.summaries)
        self.losses.update(inner.losses)

    def total_loss(self) -> jax.Array | float:
        """The sum of all weighted losses, over stacked layers too."""
        return sum((loss.sum() for loss in self.losses.values()), start=0.0)


def labelled(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Spells out entries of scanned stacks, one for each layer. For host values: under a trace it costs an op each."""
    found: dict[str, Any] = {}
    for path, value in entries.items():
        if "*" not in path.split("."):
            found[path] = value
            continue
        before, after = path.split("*", 1)
        found.update(labelled({f"{before}{index}{after}": item for index, item in enumerate(value)}))
    return found


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
    drawn: dict[str, int] = dataclasses.field(default_factory=dict)

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

    def add_summary(self, name: str, value: Any) -> None:
        """Reports a value to whoever called `invoke`; without one there is nobody to tell, and that is fine."""
        if self.collections is not None:
            self._record(self.collections.summaries, name, value)

    def add_loss(self, name: str, value: Any, weight: float = 1.0) -> None:
        """Adds `weight * value` to the objective. Losing a loss would change training, so it needs an `invoke`."""
        if self.collections is None:
            raise ContextError(
                f"{self.describe()} adds the loss {name!r}, but nobody collects losses; "
                f"run it through axcore.invoke(module, ...)"
            )
        self._record(self.collections.losses, name, value * weight)

    def _record(self, entries: dict[str, Any], name: str, value: Any) -> None:
        path = f"{self.path}.{name}" if self.path else name
        if path in entries:
            raise ContextError(f"{self.describe()} reports {name!r} twice in one call")
        entries[path] = jax.numpy.asarray(value)

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


@contextlib.contextmanager
def pushed(frame: Frame) -> Iterator[Frame]:
    token = _stack.set((*_stack.get(), frame))
    try:
        yield frame
    finally:
        _stack.reset(token)


@contextlib.contextmanager
def root(module: nnx.Module | None, *, key: jax.Array | None, training: bool, collect: bool = True) -> Iterator[Frame]:
    """A fresh stack for one call, whatever was on it before."""
    token = _stack.set(())
    try:
        collections = Collections() if collect else None
        with pushed(Frame(module, (), None, key, training, collections)) as frame:
            yield frame
    finally:
        _stack.reset(token)


@contextlib.contextmanager
def inside(parent: Frame, module: nnx.Module, names: tuple[str | jax.Array, ...]) -> Iterator[Frame]:
    """A frame for the body of a transform, with collections of its own that the transform hands back as outputs."""
    collections = None if parent.collections is None else Collections()
    with pushed(Frame(module, names, parent, None, parent.training, collections)) as frame:
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
            with pushed(Frame(module, names, holder, None, top.training, top.collections)) as frame:
                yield frame
            return
    raise ContextError(
        f"{type(module).__name__} was called inside {stack[-1].describe()}, which does not hold it; store it as an "
        f"attribute, or run it through a transform of axcore.module (a copy made by nnx.merge is not the child)"
    )


def locate(holder: Any, wanted: nnx.Module) -> tuple[str, ...] | None:
    """The attribute names that lead from a module to one that it holds, through containers and stock modules."""
    from axcore.module.layer import Layer

    entries = holder.items() if isinstance(holder, Mapping) else vars(holder).items()
    if isinstance(holder, nnx.List):
        entries = ((str(index), item) for index, item in enumerate(holder))
    nested = []
    for name, value in entries:
        if value is wanted:
            return (str(name),)
        if isinstance(value, nnx.Module) and not isinstance(value, Layer):
            nested.append((str(name), value))
    for name, value in nested:
        below = locate(value, wanted)
        if below is not None:
            return (name, *below)
    return None
