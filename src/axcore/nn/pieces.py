"""Computing over a row piece by piece, so that what lies between input and output never exists as a whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx

from axcore.module import ContextError
from axcore.module.lifted import Body, Lifted


def in_pieces(fn: Body, size: int) -> Body:
    """`fn(module, *args)` where each output place depends on the same place of the arguments alone, `size` places at a
    time; the backward pass computes each piece again.

    Args:
        fn: takes the module and arrays [batch, seq, ...]; returns a pytree of such arrays. Each piece draws PRNG bits
            of its own. It may report nothing and write no Variable.
        size: places of a row that are computed at once.
    """

    def wrapped(module: nnx.Module, *args: jax.Array) -> Any:
        lifted = Lifted.of(module, "in_pieces")
        seq = args[0].shape[1]

        def split(x: jax.Array) -> jax.Array:  # [batch, seq, ...] -> [pieces, batch, size, ...]
            widths = [(0, -seq % size) if axis == 1 else (0, 0) for axis in range(x.ndim)]
            return rearrange(jnp.pad(x, widths), "b (p s) ... -> p b s ...", s=size)

        def joined(x: jax.Array) -> jax.Array:
            return rearrange(x, "p b s ... -> b (p s) ...")[:, :seq]

        @jax.checkpoint
        def body(numbered: Any) -> Any:
            number, pieces = numbered
            output, _, collections = lifted.call(fn, lifted.params, lifted.state, *pieces, number=number)
            lifted.refuse_written("in_pieces")
            if collections is not None and (collections.summaries or collections.losses or collections.outputs):
                raise ContextError(f"{lifted.caller.describe()}: nothing can be reported from a piece of a row")
            return output

        pieces = tuple(split(x) for x in args)
        return jax.tree.map(joined, jax.lax.map(body, (jnp.arange(len(pieces[0])), pieces)))

    return wrapped
