"""JAX transforms of functions that call layers.

Each transform takes a function `fn(module, *args)` and returns a function of the same form. The module is the calling
layer or a module that it contains. `fn` receives a copy of the module and must not call the original. The copy has
the PRNG streams and paths of the original, and its reports and written Variables reach the original. For a stack of
layers, see `axcore.module.scan`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree, Shaped

from axcore.module.collections import Collections
from axcore.module.context import ContextError, Frame, current, locate, pushed
from axcore.module.pure import check_no_tracers, split

Body = Callable[..., PyTree]
"""The function that a transform runs. Its first argument is a module, except for the rules of custom derivatives."""
_Path = tuple[Hashable, ...]
"""The path of a Variable in a module."""
_Counts = tuple[dict[str, int], dict[tuple[str, ...], int]]
"""The fields `drawn` and `calls` of a frame."""
_SALT_OFFSET = 0x2F0C5A1D  # separates the salts of examples, iterations and devices from layer indices


class _BodyFrame(Frame):
    def describe(self) -> str:
        return self.parent.describe() if self.parent else ""


@contextlib.contextmanager
def _body_frame(
    caller: Frame,
    module: Any,  # Any: a module, or dicts around one
    counts: _Counts,
    key: PRNGKeyArray | None = None,
    salt: Int[Array, ""] | None = None,
) -> Iterator[Frame]:
    """A frame for code in another trace, with the path of the caller and its own collections.

    Each trace numbers its draws and calls from `counts`. The caller continues after the highest number.

    Args:
        key: The key to use instead of the caller's, whose trace may have ended.
    """
    collections = None if caller.collections is None else Collections()
    drawn, calls = dict(counts[0]), dict(counts[1])
    frame = _BodyFrame(module, (), caller, key, caller.mode, collections, caller.captured, salt, drawn, calls)
    frame.shared = caller.shared.new_child()
    with pushed(frame):
        yield frame
    _advance(caller.drawn, frame.drawn)
    _advance(caller.calls, frame.calls)


def _advance[K](counts: dict[K, int], later: dict[K, int]) -> None:
    """Raises each count to the later one."""
    counts.update({name: max(count, counts.get(name, -1)) for name, count in later.items()})


@dataclasses.dataclass(frozen=True)
class Lifted:
    """A module, split into arrays and structure, with its path in the calling layer."""

    caller: Frame
    module: nnx.Module
    names: tuple[str, ...]
    counts: _Counts
    graphdef: nnx.GraphDef[nnx.Module]
    params: PyTree
    state: PyTree
    written: set[_Path] = dataclasses.field(default_factory=set)
    """Paths of the Variables that a trace of the body wrote."""

    @classmethod
    def of(cls, module: nnx.Module, transform: str) -> Lifted:
        caller = current()
        names = () if module is caller.module else locate(caller.module or (), module)
        if names is None:
            kind = type(module).__name__
            raise ContextError(f"{caller.describe()} runs {transform} on a {kind} that it does not contain")
        return cls(caller, module, names, (dict(caller.drawn), dict(caller.calls)), *split(module))

    def call(
        self,
        fn: Body,
        params: PyTree,
        state: PyTree,
        *args: PyTree,
        number: Int[Array, ""] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[PyTree, PyTree, Collections | None]:
        """Calls `fn` on a copy with these arrays. Returns (output, new state, reports).

        Args:
            number: The index of the example, iteration or device. Each draws different random numbers.
            key: The key of the caller, if the transform does not allow to close over it.
        """
        params, state = jax.tree.map(lambda x: x, (params, state))  # NNX only writes to Variables of the current trace
        before = _values(state)
        module = nnx.merge(self.graphdef, params, state)
        holder: nnx.Module | dict[str, object] = module
        for name in reversed(self.names):
            holder = {name: holder}
        salt = None if number is None else _SALT_OFFSET + number
        with _body_frame(self.caller, holder, self.counts, key, salt) as frame:
            output = fn(module, *args)
        check_no_tracers(module)
        new = split(module)[2]
        self.written.update(path for path, value in _values(new).items() if value is not before[path])
        return output, new, frame.collections

    @property
    def path(self) -> str:
        """The path of the module."""
        return self.caller.below(".".join(self.names)) if self.names else self.caller.path

    @property
    def structure(self) -> Any:  # Any: a tree definition of JAX
        """The tree structure of the parameters and the state."""
        return jax.tree.structure((self.params, self.state))

    def equals(self, other: Lifted) -> bool:
        """Whether the modules differ in the values of their arrays at most."""
        return bool(self.graphdef == other.graphdef and self.structure == other.structure)

    def refuse_written(self, transform: str) -> None:
        if self.written:
            paths = ", ".join(sorted(".".join(map(str, path)) for path in self.written))
            raise ContextError(
                f"{self.caller.describe()}: the body of {transform} writes {paths}, but each call of the body could "
                f"write another value. Return the value from the body, and write it after {transform}"
            )

    def finish(self, state: PyTree, collections: Collections | None) -> None:
        """Copies the reports and the written Variables to the caller. Leaves other Variables untouched, so that an
        enclosing transform can tell which were written."""
        nnx.update(self.module, nnx.from_flat_state([x for x in nnx.to_flat_state(state) if x[0] in self.written]))
        self.caller.absorb(collections)


def remat[M: nnx.Module, *A, R](
    fn: Callable[[M, *A], R], *, policy: Callable[..., bool] | None = None
) -> Callable[[M, *A], R]:
    """`jax.checkpoint`: keeps the intermediate values that the policy selects for the backward pass and recomputes the
    others. Values that layers share inside reach later layers and are kept."""

    def and_shared(module: M, *args: *A) -> tuple[R, dict[str, PyTree]]:
        return fn(module, *args), dict(current().shared.maps[0])

    def wrapped(module: M, *args: *A) -> R:
        lifted = Lifted.of(module, "remat")
        body = jax.checkpoint(lambda params, state, *args: lifted.call(and_shared, params, state, *args), policy=policy)
        (output, shared), state, collections = body(lifted.params, lifted.state, *args)
        lifted.finish(state, collections)
        lifted.caller.shared.update(shared)
        return output

    return wrapped


def traced_once[M: nnx.Module, *A, R](fn: Callable[[M, *A], R]) -> Callable[[M, *A], R]:
    """Traces a function once for all modules of equal structure, such as the layers of a model: `call =
    traced_once(fn)`, then `x = call(layer, x)` for each layer. Another call of the calling layer traces again.

    The first module of a structure is traced and lowered by `jax.jit`, and the others reuse the result with their own
    parameters. XLA inlines the calls, so the compiled program is the same as with separate traces. Errors and profiles
    name the first module.

    If the caller has a PRNG key or captures outputs, each module is traced, because modules then differ in their random
    numbers and reports.

    Args:
        fn: called as `fn(module, *args)`. The arguments and the result are pytrees of arrays.
    """
    firsts: list[tuple[Lifted, Callable[..., Any]]] = []  # Any: as in `jax.jit`

    def jitted(first: Lifted) -> Callable[..., Any]:
        structure = first.structure

        def body(leaves: list[jax.Array], shared: dict[str, PyTree], *args: *A) -> PyTree:
            def with_shared(module: M, *args: *A) -> tuple[R, dict[str, PyTree]]:
                current().shared = ChainMap({}, shared)
                return fn(module, *args), dict(current().shared.maps[0])

            return first.call(with_shared, *jax.tree.unflatten(structure, leaves), *args)

        return jax.jit(body)

    def wrapped(module: M, *args: *A) -> R:
        lifted = Lifted.of(module, "traced_once")
        if lifted.caller.key is not None or lifted.caller.captured:
            return fn(module, *args)
        if firsts and firsts[0][0].caller is not lifted.caller:  # another call, perhaps in training
            firsts.clear()
        found = next((each for each in firsts if each[0].equals(lifted)), None)
        if found is None:
            found = lifted, jitted(lifted)
            firsts.append(found)
        first, run = found
        leaves = jax.tree.leaves((lifted.params, lifted.state))
        (output, shared), state, collections = run(leaves, dict(lifted.caller.shared), *args)
        lifted.written.update(first.written)
        lifted.finish(state, _renamed(collections, first.path, lifted.path))
        lifted.caller.shared.update(shared)
        result: R = output
        return result

    return wrapped


def vmap(fn: Body, *, in_axes: int | Sequence[PyTree[int]] | None = 0, out_axes: PyTree[int] = 0) -> Body:
    """`jax.vmap` over the arguments, with the same module for all examples.

    Each example draws different random numbers. Summaries are reduced over the examples by their rule; totals and
    counts of losses are added. Writing a Variable raises, because each example could write another value.
    """
    axes = tuple(in_axes) if isinstance(in_axes, Sequence) else in_axes

    def wrapped(module: nnx.Module, *args: PyTree) -> PyTree:
        lifted = Lifted.of(module, "vmap")

        def body(*args: PyTree) -> tuple[PyTree, Collections | None]:
            number = jax.lax.axis_index("axcore.vmap")
            output, _, collections = lifted.call(fn, lifted.params, lifted.state, *args, number=number)
            lifted.refuse_written("vmap")
            return output, collections

        output, collections = jax.vmap(body, in_axes=axes, out_axes=(out_axes, 0), axis_name="axcore.vmap")(*args)
        lifted.finish(lifted.state, collections.reduced() if collections is not None else None)
        return output

    return wrapped


def cond[M: nnx.Module, *A, R](
    predicate: Bool[Array, ""] | bool, true_fn: Callable[[M, *A], R], false_fn: Callable[[M, *A], R]
) -> Callable[[M, *A], R]:
    """`jax.lax.cond`. Both branches must report the same entries, since only one of them runs."""

    def wrapped(module: M, *args: *A) -> R:
        lifted = Lifted.of(module, "cond")
        reported: dict[int, set[str]] = {0: set(), 1: set()}

        def branch(index: int, *args: PyTree) -> tuple[PyTree, PyTree, Collections | None]:
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


def while_loop[M: nnx.Module, C](
    cond_fn: Callable[[C], Bool[Array, ""]], body_fn: Callable[[M, C], C]
) -> Callable[[M, C], C]:
    """`jax.lax.while_loop`: `carry = body_fn(module, carry)` while `cond_fn(carry)`.

    Each iteration draws different random numbers, and the loop carries the Variables. Reporting inside raises, because
    the number of iterations is unknown.
    """

    def wrapped(module: M, carry: C) -> C:
        lifted = Lifted.of(module, "while_loop")

        def body(loop: tuple[C, PyTree, Int[Array, ""]]) -> tuple[C, PyTree, Int[Array, ""]]:
            carry, state, collections = lifted.call(body_fn, lifted.params, loop[1], loop[0], number=loop[2])
            if reports := _entries(collections):
                raise ContextError(f"{', '.join(sorted(reports))}: reports are not supported inside while_loop")
            return carry, state, loop[2] + 1

        carry, state, _ = jax.lax.while_loop(lambda loop: cond_fn(loop[0]), body, (carry, lifted.state, jnp.int32(0)))
        lifted.finish(state, None)
        return carry

    return wrapped


def custom_jvp[*A, R](fn: Callable[[*A], R], jvp: Callable[[tuple[*A], tuple[*A]], tuple[R, R]]) -> Callable[[*A], R]:
    """`jax.custom_jvp` of a function of arrays: `fn(*args)`, `jvp(primals, tangents) -> (out, tangent of out)`.

    Both run in the frame of the calling layer, draw the same random numbers and may report summaries and outputs.
    """

    def wrapped(*args: *A) -> R:
        caller, run = _rules()

        def rule(primals: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]:
            (output, tangent), collections = run(jvp, primals[0], primals[1:], tangents[1:])
            return (output, collections), (tangent, jax.tree.map(_zero_tangent, collections))

        function = jax.custom_jvp(lambda key, *args: run(fn, key, *args))
        function.defjvp(rule)
        output, collections = function(caller.key, *args)
        caller.absorb(collections)
        result: R = output
        return result

    return wrapped


def custom_vjp[*A, R, S](
    fn: Callable[[*A], R], fwd: Callable[[*A], tuple[R, S]], bwd: Callable[[S, R], tuple[PyTree, ...]]
) -> Callable[[*A], R]:
    """`jax.custom_vjp` of a function of arrays: `fn(*args)`, `fwd(*args) -> (out, residuals)`, `bwd(residuals, g)`.

    All three run in the frame of the calling layer: `axcore.current()` provides its path and training flag, and they
    draw the same random numbers. `fn` and `fwd` may report summaries and outputs. `bwd` may not, because it runs after
    the call has ended.
    """

    def wrapped(*args: *A) -> R:
        caller, run = _rules()

        def forward(key: PRNGKeyArray, *args: *A) -> tuple[PyTree, PyTree]:
            (output, residuals), collections = run(fwd, key, *args)
            return (output, collections), (residuals, key)

        def backward(kept: PyTree, cotangents: PyTree) -> tuple[PyTree, ...]:
            gradients, collections = run(bwd, kept[1], kept[0], cotangents[0])
            if reports := _entries(collections):
                raise ContextError(
                    f"{', '.join(sorted(reports))}: a backward rule cannot report, because it runs after the call"
                )
            return (None, *gradients)

        function = jax.custom_vjp(lambda key, *args: run(fn, key, *args))
        function.defvjp(forward, backward)
        output, collections = function(caller.key, *args)
        caller.absorb(collections)
        return output

    return wrapped


def _values(state: PyTree) -> dict[_Path, Shaped[Array, ...]]:
    return {path: variable.get_raw_value() for path, variable in nnx.to_flat_state(state)}


def _rules() -> tuple[Frame, Callable[..., tuple[PyTree, Collections | None]]]:
    """The calling frame, and a function that runs a rule in its place: `run(rule, key, *args) -> (output, reports)`."""
    caller = current()
    counts = dict(caller.drawn), dict(caller.calls)

    def run(rule: Body, key: PRNGKeyArray | None, *args: PyTree) -> tuple[PyTree, Collections | None]:
        with _body_frame(caller, caller.module, counts, key) as frame:
            output = rule(*args)
        if frame.collections is not None and (losses := frame.collections.losses):
            raise ContextError(f"{', '.join(losses)}: a loss inside a rule has no gradient. Return it instead")
        return output, frame.collections

    return caller, run


def _renamed(collections: Collections | None, old: str, new: str) -> Collections | None:
    """The reports of the module at the path `old` as those of the module at `new`."""
    if collections is None or old == new:
        return collections

    def below[V](entries: dict[str, V]) -> dict[str, V]:
        return {new + path.removeprefix(old): value for path, value in entries.items()}

    return Collections(below(collections.summaries), below(collections.losses), below(collections.outputs))


def _entries(collections: Collections | None) -> set[str]:
    return set() if collections is None else {*collections.summaries, *collections.losses, *collections.outputs}


def _zero_tangent(x: Shaped[Array, ...]) -> Shaped[Array, ...] | np.ndarray:
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)
