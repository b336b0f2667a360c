"""JAX transforms of functions that call layers.

Each takes `fn(module, *args)` and gives a function of the same form. The module is the calling layer itself or one
that it holds. Inside, `fn` gets a copy of it, which alone it may call; PRNG streams, paths, reports and written
Variables are those of the original. For a stack of layers see `axcore.module.scan`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axcore.module.collections import Collections
from axcore.module.context import ContextError, Frame, current, locate, pushed
from axcore.module.pure import _refuse_escaped, split

Body = Callable[..., Any]
_APART = 0x2F0C5A1D  # added to the numbers of examples, rounds and devices, so that they are no numbers of layers


class _Inside(Frame):
    def describe(self) -> str:
        return self.parent.describe() if self.parent else ""


@contextlib.contextmanager
def _inside(caller: Frame, module: Any, counts: Any, key: Any = None, salt: Any = None) -> Iterator[Frame]:
    """The caller's place, for code of another trace: with collections of its own, and with a key if that of the caller
    may be gone. Draws and calls are numbered from `counts` on in each trace; the caller goes on after the last."""
    collections = None if caller.collections is None else Collections()
    frame = _Inside(module, (), caller, key, caller.training, collections, caller.captured, salt, *map(dict, counts))  # type: ignore[arg-type]
    frame.shared = caller.shared.new_child()
    with pushed(frame):
        yield frame
    for mine, theirs in ((frame.drawn, caller.drawn), (frame.calls, caller.calls)):
        theirs.update({name: max(count, theirs.get(name, -1)) for name, count in mine.items()})  # type: ignore


@dataclasses.dataclass(frozen=True)
class Lifted:
    """A module taken apart, at its place in the calling layer."""

    caller: Frame
    module: nnx.Module
    names: tuple[str, ...]
    counts: Any
    graphdef: Any
    params: Any
    state: Any
    written: set[Any] = dataclasses.field(default_factory=set)
    """Paths of the Variables that some trace of the body wrote."""

    @classmethod
    def of(cls, module: nnx.Module, transform: str) -> Lifted:
        caller = current()
        names = () if module is caller.module else locate(caller.module or (), module)
        if names is None:
            kind = type(module).__name__
            raise ContextError(f"{caller.describe()} runs {transform} on a {kind} that it does not hold")
        return cls(caller, module, names, (dict(caller.drawn), dict(caller.calls)), *split(module))

    def call(self, fn: Body, params: Any, state: Any, *args: Any, number: jax.Array | None = None) -> Any:
        """(output, new state, reports) of a copy with these arrays. Each `number` has draws of its own."""
        params, state = jax.tree.map(lambda x: x, (params, state))  # NNX lets only Variables made in this trace be set
        before = _values(state)
        module = holder = nnx.merge(self.graphdef, params, state)
        for name in reversed(self.names):
            holder = {name: holder}
        salt = None if number is None else _APART + number
        with _inside(self.caller, holder, self.counts, salt=salt) as frame:
            output = fn(module, *args)
        _refuse_escaped(module)
        new = split(module)[2]
        self.written.update(path for path, value in _values(new).items() if value is not before[path])
        return output, new, frame.collections

    def refuse_written(self, transform: str) -> None:
        if self.written:
            raise ContextError(f"in {self.caller.describe()} a layer writes a Variable inside {transform}")

    def finish(self, state: Any, collections: Collections | None) -> None:
        """Brings home reports and what was written; the rest stays as it is, so that a transform around can tell."""
        nnx.update(self.module, nnx.from_flat_state([x for x in nnx.to_flat_state(state) if x[0] in self.written]))
        self.caller.absorb(collections)


def remat(fn: Body, *, policy: Callable[..., bool] | None = None) -> Body:
    """`jax.checkpoint`: the backward pass keeps the values that the policy names and recomputes the others. Values that
    layers share inside reach later layers, and are kept."""

    def and_shared(module: nnx.Module, *args: Any) -> Any:
        return fn(module, *args), dict(current().shared.maps[0])

    def wrapped(module: nnx.Module, *args: Any) -> Any:
        lifted = Lifted.of(module, "remat")
        body = jax.checkpoint(lambda params, state, *args: lifted.call(and_shared, params, state, *args), policy=policy)
        (output, shared), state, collections = body(lifted.params, lifted.state, *args)
        lifted.finish(state, collections)
        lifted.caller.shared.update(shared)
        return output

    return wrapped


def vmap(fn: Body, *, in_axes: int | Sequence[Any] | None = 0, out_axes: Any = 0) -> Body:
    """`jax.vmap` over the arguments; the module is the same for all.

    Each example draws PRNG bits of its own. Summaries are reduced over the examples by their rule; totals and
    counts of losses are added. Writing a Variable is an error: the examples would write different things.
    """
    axes = tuple(in_axes) if isinstance(in_axes, Sequence) else in_axes

    def wrapped(module: nnx.Module, *args: Any) -> Any:
        lifted = Lifted.of(module, "vmap")

        def body(*args: Any) -> Any:
            number = jax.lax.axis_index("axcore.vmap")
            output, _, collections = lifted.call(fn, lifted.params, lifted.state, *args, number=number)
            lifted.refuse_written("vmap")
            return output, collections

        output, collections = jax.vmap(body, in_axes=axes, out_axes=(out_axes, 0), axis_name="axcore.vmap")(*args)
        lifted.finish(lifted.state, collections.reduced() if collections is not None else None)
        return output

    return wrapped


def cond(predicate: Any, true_fn: Body, false_fn: Body) -> Body:
    """`jax.lax.cond`. Both branches must report the same entries, since only one of them runs."""

    def wrapped(module: nnx.Module, *args: Any) -> Any:
        lifted = Lifted.of(module, "cond")
        reported: dict[int, set[str]] = {0: set(), 1: set()}

        def branch(index: int, *args: Any) -> Any:
            result = lifted.call((true_fn, false_fn)[index], *args)
            reported[index] = _entries(result[2])
            return result

        branches = functools.partial(branch, 0), functools.partial(branch, 1)
        try:
            output, state, collections = jax.lax.cond(predicate, *branches, lifted.params, lifted.state, *args)
        except TypeError as error:
            where = f"in {lifted.caller.describe()}"
            if only := ", ".join(sorted(reported[0] ^ reported[1])):
                raise ContextError(f"{where} one branch of cond reports {only} and the other does not") from None
            error.add_note(f"{where}, which runs cond")
            raise
        lifted.finish(state, collections)
        return output

    return wrapped


def while_loop(cond_fn: Callable[[Any], Any], body_fn: Body) -> Body:
    """`jax.lax.while_loop`: `carry = body_fn(module, carry)` while `cond_fn(carry)`.

    Each round draws PRNG bits of its own, and Variables are carried along. Reporting inside is an error: nobody knows
    how many rounds there will be.
    """

    def wrapped(module: nnx.Module, carry: Any) -> Any:
        lifted = Lifted.of(module, "while_loop")

        def body(loop: tuple[Any, Any, jax.Array]) -> Any:
            carry, state, collections = lifted.call(body_fn, lifted.params, loop[1], loop[0], number=loop[2])
            if reports := _entries(collections):
                raise ContextError(f"{', '.join(sorted(reports))}: nothing can be reported inside while_loop")
            return carry, state, loop[2] + 1

        carry, state, _ = jax.lax.while_loop(lambda loop: cond_fn(loop[0]), body, (carry, lifted.state, jnp.int32(0)))
        lifted.finish(state, None)
        return carry

    return wrapped


def custom_jvp(fn: Body, jvp: Body) -> Body:
    """`jax.custom_jvp` of a function of arrays: `fn(*args)`, `jvp(primals, tangents) -> (out, tangent of out)`.

    Both run in the frame of the layer that calls, draw the same PRNG bits and may report summaries and outputs.
    """

    def wrapped(*args: Any) -> Any:
        caller, run = _rules()

        def rule(primals: Any, tangents: Any) -> Any:
            (output, tangent), collections = run(jvp, primals[0], primals[1:], tangents[1:])
            return (output, collections), (tangent, jax.tree.map(_zero_tangent, collections))

        function = jax.custom_jvp(lambda key, *args: run(fn, key, *args))
        function.defjvp(rule)
        output, collections = function(caller.key, *args)
        caller.absorb(collections)
        return output

    return wrapped


def custom_vjp(fn: Body, fwd: Body, bwd: Body) -> Body:
    """`jax.custom_vjp` of a function of arrays: `fn(*args)`, `fwd(*args) -> (out, residuals)`, `bwd(residuals, g)`.

    All three run in the frame of the layer that calls: `axcore.current()` gives them its path and training flag, and
    the same PRNG bits. `fn` and `fwd` may report summaries and outputs. `bwd` may not: its call is long over.
    """

    def wrapped(*args: Any) -> Any:
        caller, run = _rules()

        def forward(key: Any, *args: Any) -> Any:
            (output, residuals), collections = run(fwd, key, *args)
            return (output, collections), (residuals, key)

        def backward(kept: Any, cotangents: Any) -> Any:
            gradients, collections = run(bwd, kept[1], kept[0], cotangents[0])
            if reports := _entries(collections):
                raise ContextError(f"{', '.join(sorted(reports))}: a backward rule cannot report, its call is over")
            return (None, *gradients)

        function = jax.custom_vjp(lambda key, *args: run(fn, key, *args))
        function.defvjp(forward, backward)
        output, collections = function(caller.key, *args)
        caller.absorb(collections)
        return output

    return wrapped


def _values(state: Any) -> dict[Any, Any]:
    return {path: variable.get_raw_value() for path, variable in nnx.to_flat_state(state)}


def _rules() -> tuple[Frame, Body]:
    """The calling frame, and what runs a rule in its place with a key: (output, what was reported)."""
    caller = current()
    counts = dict(caller.drawn), dict(caller.calls)

    def run(rule: Body, key: Any, *args: Any) -> Any:
        with _inside(caller, caller.module, counts, key) as frame:
            output = rule(*args)
        if frame.collections is not None and (losses := frame.collections.losses):
            raise ContextError(f"{', '.join(losses)}: a loss inside a rule would have no gradient; return it instead")
        return output, frame.collections

    return caller, run


def _entries(collections: Collections | None) -> set[str]:
    return set() if collections is None else {*collections.summaries, *collections.losses, *collections.outputs}


def _zero_tangent(x: jax.Array) -> Any:
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)
