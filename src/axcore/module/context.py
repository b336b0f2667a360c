"""The invocation context: a stack of frames that locates a call in the module tree and collects its reports.

Frames refer to modules, but modules do not refer to frames. Code outside of layers, such as an optax transformation, a
`custom_vjp` rule or a kernel, may also call `current()`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from axcore.config import AxcoreError, matches
from axcore.module.collections import Collections, Kind, LossSum, Reduce, Summary, histogram
from axcore.module.rngs import fold
from axcore.module.tabulate import list_calls


class ContextError(AxcoreError):
    """A layer used the invocation context in an unsupported way. The message names the layer."""


class MissingKey(ContextError):
    """A layer drew random numbers in a call without a key.

    Attributes:
        layer: the path and class of the layer.
    """

    def __init__(self, layer: str, stream: str):
        super().__init__(
            f"{layer} drew from the PRNG stream {stream!r}, but the call has no key. "
            f"Call axcore.invoke(module, ..., key=...), or build the model with nnx.Rngs before model.train()"
        )
        self.layer = layer


@dataclasses.dataclass
class Frame:
    """One call of one layer.

    `names` are the path segments below the parent; a traced index is a layer of a scanned stack. The key is derived
    at each use, because a cached key could be a tracer of an inner trace.
    """

    module: nnx.Module | None
    names: tuple[str | Int[Array, ""], ...]
    parent: Frame | None
    root_key: PRNGKeyArray | None
    mode: bool | None
    """Whether the call is part of a training step. None in a direct call, outside of `invoke`, where the attribute
    `deterministic` of each layer decides."""
    collections: Collections | None
    captured: tuple[str, ...] = ()
    """Path patterns of the outputs to collect."""
    salt: Int[Array, ""] | int | None = None
    """Folded into the key, so that mapped examples, loop iterations and repeated calls draw different bits."""
    drawn: dict[str, int] = dataclasses.field(default_factory=dict)
    """The number of the last draw from each PRNG stream."""
    calls: dict[tuple[str, ...], int] = dataclasses.field(default_factory=dict)
    """The number of the last call of each child."""
    shared: ChainMap[str, PyTree] = dataclasses.field(default_factory=ChainMap)
    """Values that layers share with later ones. The body of a transform adds to its own map."""

    @property
    def path(self) -> str:
        """The path of the layer, with `*` for a layer of a scanned stack."""
        above = self.parent.path if self.parent else ""
        own = ".".join(name if isinstance(name, str) else "*" for name in self.names)
        return ".".join(part for part in (above, own) if part)

    @property
    def key(self) -> PRNGKeyArray | None:
        """The key of this call, or None if the call has no key."""
        key = self.root_key if self.root_key is not None else (self.parent.key if self.parent else None)
        if key is not None:
            for name in self.names:
                key = fold(key, name)
            if self.salt is not None:
                key = fold(key, self.salt)
        return key

    @property
    def training(self) -> bool:
        """Whether the call is part of a training step.

        Raises:
            ContextError: The layer was called outside of `invoke`, and its mode was not set.
        """
        if self.mode is not None:
            return self.mode
        frame: Frame | None = self
        while frame is not None:
            deterministic = getattr(frame.module, "deterministic", None)
            if deterministic is not None:
                return not deterministic
            frame = frame.parent
        raise ContextError(
            f"{self.describe()} was called outside of axcore.invoke, and the call differs between training and "
            f"evaluation. Call model.train() or model.eval() before, or axcore.invoke(model, ..., training=...)"
        )

    def rng(self, stream: str) -> PRNGKeyArray:
        """A new key of the named stream. The n-th key of a stream in one call is always the same."""
        key = self.key
        if key is None:
            raise MissingKey(self.describe(), stream)
        drawn = self.drawn[stream] = self.drawn.get(stream, -1) + 1
        key = fold(key, stream)
        return fold(key, drawn) if drawn else key

    def add_summary(self, name: str, value: ArrayLike, reduce: Reduce = Reduce.MEAN, kind: Kind = Kind.SCALAR) -> None:
        """Reports a value to the caller of `invoke`. Outside of `invoke`, the value is dropped."""
        if self.collections is not None:
            array = jnp.asarray(value)
            array = histogram(array) if kind is Kind.HISTOGRAM else array
            self._record(self.collections.summaries, name, Summary(array, kind, reduce))

    def give(self, name: str, value: PyTree) -> None:
        """Shares a value with later layers. Numbers become arrays, as they do inside transforms.

        Raises:
            ContextError: a leaf is neither an array nor a number, or JAX does not support it, such as a large int.
        """
        try:
            self.shared[name] = jax.tree.map(jnp.asarray, value)
        except (TypeError, OverflowError, ValueError) as error:  # not an array, a large int, a dict that has no order
            raise ContextError(
                f"{self.describe()}: the shared value {name!r} must contain only arrays and numbers that JAX supports, "
                f"since it passes through transforms ({error}). Set other values in the configs of the layers"
            ) from None

    def take(self, name: str) -> PyTree:
        """The value that was shared last under this name."""
        if name not in self.shared:
            raise ContextError(
                f"{self.describe()}: shared({name!r}) requires an earlier layer that calls share({name!r}, ...), but "
                f"the earlier layers share {', '.join(map(repr, self.shared)) or 'nothing'}. A value that is shared "
                f"inside a transform other than remat and scan stays inside; share it outside"
            )
        return self.shared[name]

    def add_output(self, name: str, value: PyTree) -> None:
        """Reports a value for inspection if a pattern of `invoke(capture=...)` matches it."""
        path = self.below(name)
        if self.collections is not None and any(matches(pattern, path) for pattern in self.captured):
            self._record(self.collections.outputs, name, value)

    def add_result(self, value: PyTree) -> None:
        """Reports the result of the layer if its path is captured. After several calls the last result remains."""
        if self.collections is not None and any(matches(pattern, self.path) for pattern in self.captured):
            self.collections.outputs[self.path] = value

    def add_loss(self, name: str, total: ArrayLike, count: ArrayLike, weight: float = 1.0) -> None:
        """Adds `weight * total / count` to the objective. Raises outside of `invoke`, because a dropped loss changes
        training.

        Args:
            total: A scalar, the sum of the loss over tokens, rows or other units.
            count: A scalar, the number of units. It must not depend on parameters. Totals and counts of examples,
                devices and microbatches are added before the division.
            weight: A Python number.
        """
        if self.collections is None:
            raise ContextError(
                f"{self.describe()} adds the loss {name!r}, but the call does not collect losses. "
                f"Call axcore.invoke(module, ...)"
            )
        loss = LossSum(jnp.asarray(total, jnp.float32), jnp.asarray(count, jnp.float32), float(weight))
        self._record(self.collections.losses, name, loss)

    def map[T, R](self, fn: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """`[fn(item) for item in items]`, where the calls may report under the same names, such as for several blocks
        of rows. `Collections.combined` combines their reports."""
        whole = self.collections
        if whole is None or len(items) < 2:
            return [fn(item) for item in items]
        parts, found = [Collections() for _ in items], []
        try:
            for item, self.collections in zip(items, parts, strict=True):
                found.append(fn(item))
        finally:
            self.collections = whole
        self.absorb(Collections.combined(parts))
        return found

    def absorb(self, inner: Collections | None) -> None:
        """Adds the reports of the body of a transform, whose paths are already complete."""
        if inner is None or self.collections is None:
            return
        for kind in ("summaries", "losses", "outputs"):
            mine, theirs = getattr(self.collections, kind), getattr(inner, kind)
            for path in theirs:
                if path in mine:
                    raise ContextError(f"{path} is reported twice in one call of {self.describe()}")
            mine.update(theirs)

    def repeated(self, names: tuple[str, ...]) -> int | None:
        """The salt of a call of a child: None for the first call, then 1, 2, ..."""
        count = self.calls[names] = self.calls.get(names, -1) + 1
        return count or None

    def below(self, name: str) -> str:
        """The path of `name` in this frame."""
        return f"{self.path}.{name}" if self.path else name

    def _record[V](self, entries: dict[str, V], name: str, value: V) -> None:
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
        ContextError: No call of a layer is active.
    """
    stack = _stack.get()
    if not stack:
        raise ContextError("no invocation context is active. Call the module through axcore.invoke")
    return stack[-1]


def layer_index() -> tuple[Int[Array, ""], ...]:
    """The index of the current layer in each enclosing scanned stack, outermost first."""
    index: list[Int[Array, ""]] = []
    frame = _stack.get()[-1] if _stack.get() else None
    while frame is not None:
        index += [name for name in reversed(frame.names) if not isinstance(name, str)]
        frame = frame.parent
    return tuple(reversed(index))


@contextlib.contextmanager
def pushed(frame: Frame) -> Iterator[Frame]:
    """Makes `frame` the innermost frame. Its operations carry the names of the layer, in profiles for example."""
    token = _stack.set((*_stack.get(), frame))
    names = frame.names if frame.parent is not None else ()  # those of a root are a whole path
    scope = "/".join(name if isinstance(name, str) else "*" for name in names)
    try:
        with jax.named_scope(scope) if scope else contextlib.nullcontext():
            yield frame
    finally:
        _stack.reset(token)


@contextlib.contextmanager
def root(
    module: nnx.Module | None,
    *,
    key: PRNGKeyArray | None,
    training: bool | None,
    collect: bool = True,
    captured: tuple[str, ...] = (),
    names: tuple[str, ...] = (),
    shared: Mapping[str, PyTree] | None = None,
) -> Iterator[Frame]:
    """A new stack for one call. The previous stack is restored afterwards.

    Args:
        training: The mode of the call; see `Frame.mode`.
        shared: Values that the caller shares with all layers.
    """
    token = _stack.set(())
    try:
        collections = Collections() if collect else None
        with pushed(Frame(module, names, None, key, training, collections, captured)) as frame:
            for name, value in (shared or {}).items():
                frame.give(name, value)
            yield frame
    finally:
        _stack.reset(token)


@contextlib.contextmanager
def inside(
    parent: Frame,
    module: nnx.Module,
    names: tuple[str | Int[Array, ""], ...],
    salt: Int[Array, ""] | int | None = None,
) -> Iterator[Frame]:
    """A frame for the body of a transform, with its own collections, which the transform returns as outputs."""
    collections = None if parent.collections is None else Collections()
    # A body in the caller's own frame continues its count of draws, so that no draw repeats an earlier one.
    drawn = parent.drawn if not names else {}
    frame = Frame(module, names, parent, None, parent.mode, collections, parent.captured, salt, drawn)
    frame.shared = parent.shared.new_child()
    with pushed(frame):
        yield frame


@contextlib.contextmanager
def entered(module: nnx.Module) -> Iterator[Frame]:
    """The frame of a call of `module`: a child of the nearest frame whose module contains it.

    Without a frame, this is a direct call, which reports nothing. In a direct call, a module that no frame contains is
    a copy made by a transform or tool of NNX. Its call is another direct call, since NNX may cache the trace and reuse
    values of this one.
    """
    stack = _stack.get()
    if stack and stack[-1].module is module:  # super().__call__, or a transform that has already pushed the frame
        yield stack[-1]
        return
    for holder in reversed(stack):
        names = locate(holder.module, module) if holder.module is not None else None
        if names is not None:
            top = stack[-1]
            frame = Frame(module, names, holder, None, top.mode, top.collections, top.captured)
            frame.salt, frame.shared = holder.repeated(names), top.shared
            with pushed(frame):
                yield frame
            return
    if stack and stack[-1].mode is not None:
        raise ContextError(
            f"{type(module).__name__} was called inside {stack[-1].describe()}, which does not contain it. Store it as "
            f"an attribute, or call it through a transform of axcore.module (a copy made by nnx.merge is not the child)"
        )
    list_calls(module)
    with root(module, key=_own_key(module), training=None, collect=False) as frame:
        yield frame


def _own_key(module: nnx.Module) -> PRNGKeyArray | None:
    """The next key of the stream that a layer built from `nnx.Rngs` keeps, if the layer is in training mode."""
    stream = getattr(module, "rngs", None)
    training = getattr(module, "deterministic", None) is False
    return stream() if training and isinstance(stream, nnx.RngStream) else None


def locate(holder: object, wanted: nnx.Module) -> tuple[str, ...] | None:
    """The names that lead from a module to one that it contains, through containers and plain NNX modules."""
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


def _items(holder: object) -> Iterator[tuple[str, object]]:
    if isinstance(holder, nnx.List | tuple | list):
        return ((str(index), item) for index, item in enumerate(holder))
    entries = holder if isinstance(holder, Mapping) else vars(holder)
    return ((str(name), item) for name, item in entries.items())
