"""JAX transforms of functions that call layers.

Each takes `fn(module, *args)` and gives a function of the same form. The module is the calling layer itself or one
that it holds. Inside, `fn` gets a copy of it, which alone it may call; PRNG streams, paths, reports and written
Variables are those of the original. For a stack of layers see `axcore.module.scan`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axcore.module.collections import Collections
from axcore.module.context import ContextError, Frame, current, inside, locate, pushed
from axcore.module.pure import split

Body = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Lifted:
    """A module taken apart, at its place in the calling layer."""

    caller: Frame
    module: nnx.Module
    names: tuple[str, ...]
    graphdef: Any
    params: Any
    state: Any

    @classmethod
    def of(cls, module: nnx.Module, transform: str) -> Lifted:
        caller = current()
        names = () if module is caller.module else locate(caller.module, module)
        if names is None:
            raise ContextError(
                f"{caller.describe()} runs {transform} on a {type(module).__name__} that it does not hold"
            )
        return cls(caller, module, names, *split(module))

    def call(self, fn: Body, params: Any, state: Any, *args: Any, salt: jax.Array | None = None) -> Any:
        """(output, new state, what was reported), from a copy of the module that holds these arrays."""
        module = nnx.merge(self.graphdef, params, state)
        with inside(self.caller, module, self.names, salt) as frame:
            output = fn(module, *args)
        return output, split(module)[2], frame.collections

    def finish(self, state: Any, collections: Collections | None) -> None:
        """Brings home what the body wrote and reported."""
        nnx.update(self.module, state)
        self.caller.absorb(collections)


def remat(fn: Body, *, policy: Callable[..., bool] | None = None) -> Body:
    """`jax.checkpoint`: the backward pass keeps what the policy says and computes the rest again."""

    def wrapped(module: nnx.Module, *args: Any) -> Any:
        lifted = Lifted.of(module, "remat")
        body = jax.checkpoint(lambda params, state, *args: lifted.call(fn, params, state, *args), policy=policy)
        output, state, collections = body(lifted.params, lifted.state, *args)
        lifted.finish(state, collections)
        return output

    return wrapped


def vmap(fn: Body, *, in_axes: int | Sequence[Any] | None = 0, out_axes: Any = 0) -> Body:
    """`jax.vmap` over the arguments; the module is the same for all.

    Each example draws PRNG bits of its own. Summaries are reduced over the examples by their rule, losses by their
    mean. Writing a Variable is an error: the examples would write different things.
    """

    def wrapped(module: nnx.Module, *args: Any) -> Any:
        lifted = Lifted.of(module, "vmap")
        axes = tuple(in_axes) if isinstance(in_axes, Sequence) else (in_axes,) * len(args)

        def body(index: jax.Array, *args: Any) -> Any:
            output, state, collections = lifted.call(fn, lifted.params, lifted.state, *args, salt=index)
            refuse_written(lifted, state, "vmap")
            return output, collections

        count = _mapped_size(args, axes)
        mapped = jax.vmap(body, in_axes=(0, *axes), out_axes=(out_axes, 0))
        output, collections = mapped(jnp.arange(count), *args)
        lifted.finish(lifted.state, collections.reduced() if collections is not None else None)
        return output

    return wrapped


def cond(predicate: Any, true_fn: Body, false_fn: Body) -> Body:
    """`jax.lax.cond`. Both branches must report the same entries, since only one of them runs."""

    def wrapped(module: nnx.Module, *args: Any) -> Any:
        lifted = Lifted.of(module, "cond")
        drawn = dict(lifted.caller.drawn)
        reported: list[set[str]] = []

        def branch(fn: Body) -> Body:
            def run(params: Any, state: Any, *args: Any) -> Any:
                lifted.caller.drawn.clear()  # both branches draw as if the other were not there
                lifted.caller.drawn.update(drawn)
                result = lifted.call(fn, params, state, *args)
                reported.append(_entries(result[2]))
                return result

            return run

        branches = branch(true_fn), branch(false_fn)
        for each in branches:
            jax.eval_shape(each, lifted.params, lifted.state, *args)
        if reported[0] != reported[1]:
            only = ", ".join(sorted(reported[0] ^ reported[1]))
            raise ContextError(
                f"in {lifted.caller.describe()} one branch of cond reports {only} and the other does not"
            )
        output, state, collections = jax.lax.cond(predicate, *branches, lifted.params, lifted.state, *args)
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
            carry, state, count = loop
            carry, state, collections = lifted.call(body_fn, lifted.params, state, carry, salt=count)
            if reports := _entries(collections):
                raise ContextError(f"{', '.join(sorted(reports))}: nothing can be reported inside while_loop")
            return carry, state, count + 1

        carry, state, _ = jax.lax.while_loop(lambda loop: cond_fn(loop[0]), body, (carry, lifted.state, jnp.int32(0)))
        lifted.finish(state, None)
        return carry

    return wrapped


def custom_jvp(fn: Body, jvp: Body) -> Body:
    """`jax.custom_jvp` of a function of arrays: `fn(*args)`, `jvp(primals, tangents) -> (out, tangent of out)`.

    Both run in the frame of the layer that calls; both may report.
    """

    def wrapped(*args: Any) -> Any:
        caller = current()

        def call(*args: Any) -> Any:
            with _again(caller) as frame:
                return fn(*args), frame.collections

        def rule(primals: Any, tangents: Any) -> Any:
            with _again(caller) as frame:
                output, tangent = jvp(primals, tangents)
            return (output, frame.collections), (tangent, _zero_tangents(frame.collections))

        function = jax.custom_jvp(call)
        function.defjvp(rule)
        return _bring_home(caller, *function(*args))

    return wrapped


def custom_vjp(fn: Body, fwd: Body, bwd: Body) -> Body:
    """`jax.custom_vjp` of a function of arrays: `fn(*args)`, `fwd(*args) -> (out, residuals)`, `bwd(residuals, g)`.

    All three run in the frame of the layer that calls: `axcore.current()` gives them its path, training flag and PRNG.
    `fn` and `fwd` may report. `bwd` may not: it runs when the call is long over.
    """

    def wrapped(*args: Any) -> Any:
        caller = current()
        key = caller.key

        def call(key: Any, *args: Any) -> Any:
            with _again(caller, key) as frame:
                return fn(*args), frame.collections

        def forward(key: Any, *args: Any) -> Any:
            with _again(caller, key) as frame:
                output, residuals = fwd(*args)
            return (output, frame.collections), (residuals, key)

        def backward(kept: Any, cotangents: Any) -> Any:
            residuals, key = kept
            with _again(caller, key) as frame:
                gradients = bwd(residuals, cotangents[0])
            if reports := _entries(frame.collections):
                raise ContextError(f"{', '.join(sorted(reports))}: a backward rule cannot report, its call is over")
            return (None, *gradients)

        function = jax.custom_vjp(call)
        function.defvjp(forward, backward)
        return _bring_home(caller, *function(key, *args))

    return wrapped


def _again(caller: Frame, key: Any = None) -> Any:
    """The caller's frame, for code that runs in another trace: its own collections, and no key of the outer trace."""
    collections = None if caller.collections is None else Collections()
    names = tuple(name if isinstance(name, str) else "*" for name in caller.names)
    frame = dataclasses.replace(caller, collections=collections, drawn={})
    if key is not None:
        frame = _Rekeyed(caller.module, names, caller.parent, key, caller.training, collections, caller.captured)
    return pushed(frame)


class _Rekeyed(Frame):
    """A frame whose key is given whole, since deriving it would take tracers across a boundary."""

    @property
    def key(self) -> jax.Array | None:
        return self.root_key


def _bring_home(caller: Frame, output: Any, collections: Collections | None) -> Any:
    caller.absorb(collections)
    return output


def _entries(collections: Collections | None) -> set[str]:
    return set() if collections is None else {*collections.summaries, *collections.losses, *collections.outputs}


def refuse_written(lifted: Lifted, state: Any, transform: str) -> None:
    before, after = jax.tree.leaves(lifted.state), jax.tree.leaves(state)
    if any(a is not b for a, b in zip(before, after, strict=True)):
        raise ContextError(f"in {lifted.caller.describe()} a layer writes a Variable inside {transform}")


def _mapped_size(args: Sequence[Any], axes: Sequence[Any]) -> int:
    for arg, axis in zip(args, axes, strict=True):
        if isinstance(axis, int):
            return jax.tree.leaves(arg)[0].shape[axis]
    raise ContextError("vmap needs at least one argument with a mapped axis")


def _zero_tangents(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jax.dtypes.float0), tree
    )
