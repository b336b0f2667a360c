"""Stacks of layers: many in one module, run by a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axcore.module.collections import Collections
from axcore.module.context import ContextError, current, inside, locate
from axcore.module.pure import _refuse_escaped
from axcore.module.rngs import Rngs
from axcore.module.variables import DecodingState


def stack(build: Callable[[Rngs], nnx.Module], rngs: Rngs, count: int) -> Any:
    """`count` modules in one, each array with a leading axis over them.

    Each draws from `rngs` at its own index, so no two start alike, and each starts as it would alone.
    """
    graphdefs: list[Any] = []

    def one(index: jax.Array) -> Any:
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
    carry: Any,
    *args: Any,
    count: int,
    unroll: int = 1,
    remat: Callable[..., bool] | None = None,
) -> Any:
    """Runs a stacked module layer by layer: `carry = layer(carry, *args)`, traced once.

    Each layer has a frame of its own, so its PRNG streams are those that it would have unrolled. What the layers report
    comes back under `*` with a leading axis over them, and Variables other than parameters keep what a layer wrote.
    `DecodingState` is carried through the loop whole, so that layers can write to it in place.

    Args:
        layers: a child of the calling layer, made by `stack`.
        carry: what the first layer takes, and each hands to the next; its shape and dtype must not change.
        args: the same for every layer.
        count: how many layers are stacked.
        unroll: how many layers one step of the loop holds; `count` removes the loop.
        remat: which intermediate values the backward pass may keep; None keeps all.

    Returns:
        The last layer's output.
    """
    caller = current()
    names = locate(caller.module, layers) if caller.module is not None else None
    if names is None:
        raise ContextError(f"{caller.describe()} scans a {type(layers).__name__} that it does not hold")
    graphdef, params, held, state = _split(layers)
    again, written, rewritten = caller.repeated(names), list[bool](), list[bool]()

    def body(carries: Any, xs: Any) -> tuple[Any, tuple[Any, Collections | None]]:
        carry, held = carries
        index, params, state = xs
        before = jax.tree.leaves(state), jax.tree.leaves(held)
        layer = nnx.merge(graphdef, params, held, state)
        with inside(caller, layer, (*names, index), again) as frame:
            carry = layer(carry, *args)
        _refuse_escaped(layer)
        _, _, held, new = _split(layer)
        written.extend(a is not b for a, b in zip(before[0], jax.tree.leaves(new), strict=True))
        rewritten.extend(a is not b for a, b in zip(before[1], jax.tree.leaves(held), strict=True))
        return (carry, held), (new, frame.collections)

    if remat is not None:
        # In a loop the recomputation cannot be merged with the forward pass; unrolled, XLA would undo it.
        body = jax.checkpoint(body, policy=remat, prevent_cse=unroll >= count)
    try:
        (carry, held), (state, collections) = jax.lax.scan(
            body, (carry, held), (jnp.arange(count), params, state), unroll=unroll
        )
    except (TypeError, ValueError) as error:
        error.add_note(f"in the scan over {count} layers of {caller.below('.'.join(names))}")
        raise
    if any(written):  # writing back what nobody wrote would look like a write to a transform around this one
        nnx.update(layers, state)
    if any(rewritten):
        nnx.update(layers, held)
    caller.absorb(collections)
    return carry


def _split(layers: nnx.Module) -> tuple[Any, Any, Any, Any]:
    """(graph definition, parameters, decoding state, other state)."""
    graphdef, params, held, state = nnx.split(layers, nnx.Param, DecodingState, ...)  # type: ignore[misc]
    return graphdef, params, held, state
