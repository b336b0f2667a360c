"""Stacks of layers: several layers in one module, run by a loop."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Int, PyTree, Shaped

from axcore.config import ConfigError
from axcore.module.collections import Collections
from axcore.module.context import ContextError, current, inside, locate
from axcore.module.pure import check_no_tracers
from axcore.module.rngs import Rngs
from axcore.module.variables import DecodingState


def stack[M: nnx.Module](build: Callable[[Rngs], M], rngs: Rngs, count: int) -> M:
    """`count` modules in one, whose arrays have a leading axis over the modules.

    Each module is initialized with the rngs of its index, and gets the same values as outside of a stack.
    """
    graphdefs: list[nnx.GraphDef[M]] = []

    def one(index: Int[Array, ""]) -> PyTree:
        graphdef, state = nnx.split(build(rngs.index(index)))
        graphdefs.append(graphdef)
        return nnx.to_pure_dict(state)

    state = jax.vmap(one)(jnp.arange(count))
    module = nnx.merge(graphdefs[0], state)
    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Variable) and "axes" in (metadata := variable.get_metadata()):
            variable.set_metadata(axes=("layer", *metadata["axes"]))
    return module


def scan(
    layers: nnx.Module,
    carry: PyTree,
    *args: PyTree,
    count: int,
    unroll: int = 1,
    remat: Callable[..., bool] | None = None,
) -> PyTree:
    """Runs a stacked module layer by layer: `carry = layer(carry, *args)`, traced once.

    Each layer has its own frame and draws the same random numbers as in an unrolled stack. Reports have paths with `*`
    and a leading axis over the layers. Layers may write to Variables other than parameters. Values that a layer shares
    reach the later layers and the code after the stack, as in an unrolled stack. The loop carries the whole
    `DecodingState`, so that layers can write to it in place.

    Args:
        layers: A child of the calling layer, made by `stack`.
        carry: The input of the first layer. Each layer must return a value of the same shape and dtype.
        args: Further arguments, the same for every layer.
        count: The number of stacked layers.
        unroll: The number of layers in one iteration of the loop; `count` removes the loop.
        remat: The policy of `jax.checkpoint`, which selects the intermediate values to keep for the backward pass.
            None keeps all.

    Returns:
        The output of the last layer.
    """
    caller = current()
    names = locate(caller.module, layers) if caller.module is not None else None
    if names is None:
        raise ContextError(f"{caller.describe()} scans a {type(layers).__name__} that it does not contain")
    graphdef, params, held, state = _split(layers)
    again, written, rewritten = caller.repeated(names), list[bool](), list[bool]()
    outside = dict(caller.shared)
    forms: list[PyTree] = []

    def body(carries: PyTree, xs: PyTree) -> tuple[PyTree, tuple[PyTree, Collections | None]]:
        carry, held, earlier = carries
        index, params, state = xs
        before = jax.tree.leaves(state), jax.tree.leaves(held)
        layer: Any = nnx.merge(graphdef, params, held, state)  # Any: a module that can be called
        with inside(caller, layer, (*names, index), again) as frame:
            frame.shared = ChainMap({}, outside | {name: earlier[name] for name in earlier if name in outside})
            forms[:] = [jax.tree.map(_form, carry)]
            carry = layer(carry, *args)
            forms.append(jax.tree.map(_form, carry))
        if (shared := frame.shared.maps[0]).keys() != earlier.keys():
            raise _SharesError(shared)
        check_no_tracers(layer)
        _, _, held, new = _split(layer)
        written.extend(a is not b for a, b in zip(before[0], jax.tree.leaves(new), strict=True))
        rewritten.extend(a is not b for a, b in zip(before[1], jax.tree.leaves(held), strict=True))
        return (carry, held, shared), (new, frame.collections)

    def run(shared: dict[str, PyTree]) -> PyTree:
        xs = jnp.arange(count), params, state
        return jax.lax.scan(body, (carry, held, shared), xs, unroll=unroll)

    if remat is not None:
        # XLA cannot merge the recomputation with the forward pass in a loop, but it would in unrolled code.
        body = jax.checkpoint(body, policy=remat, prevent_cse=unroll >= count)
    try:
        try:
            (carry, held, shared), (state, collections) = run({})
        except _SharesError as error:
            (carry, held, shared), (state, collections) = run(error.before_first(outside))
    except (TypeError, ValueError) as error:
        where = caller.below(".".join(names))
        if len(forms) == 2 and forms[0] != forms[1]:
            given, found = (jax.tree.map(lambda form: f"{form.dtype}{list(form.shape)}", each) for each in forms)
            raise ConfigError(
                f"{where}: each layer of a stack must return the shape and dtype of its input, which is {given}, not "
                f"{found}. If the dtypes differ, set equal dtypes.compute above the stack and in it"
            ) from error
        error.add_note(f"in the scan over {count} layers of {where}")
        raise
    if any(written):  # otherwise an enclosing transform would mistake the update for a write
        nnx.update(layers, state)
    if any(rewritten):
        nnx.update(layers, held)
    caller.shared.update(shared)
    caller.absorb(collections)
    return carry


class _SharesError(Exception):
    """Ends the first trace of a scanned layer that shares values, which the loop then has to carry."""

    def __init__(self, shared: Mapping[str, PyTree]):
        self.forms = {name: jax.tree.map(_form, value) for name, value in shared.items()}

    def before_first(self, outside: dict[str, PyTree]) -> dict[str, PyTree]:
        """The values that the loop starts with: those shared before the stack, if they have the same form.

        Other names get zeros, which no layer takes, and are removed from `outside`.
        """
        before = {}
        for name, form in self.forms.items():
            earlier = outside.get(name)
            if jax.tree.flatten(jax.tree.map(_form, earlier)) != jax.tree.flatten(form):
                outside.pop(name, None)
                earlier = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), form)
            before[name] = earlier
        return before


def _form(leaf: Shaped[ArrayLike, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def _split(layers: nnx.Module) -> tuple[nnx.GraphDef[nnx.Module], PyTree, PyTree, PyTree]:
    """(graph definition, parameters, decoding state, other state)."""
    graphdef, params, held, state = nnx.split(layers, nnx.Param, DecodingState, ...)  # type: ignore[misc]
    return graphdef, params, held, state
