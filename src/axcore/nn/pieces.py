"""Computation over pieces of a sequence, so that intermediate arrays such as logits never exist for a whole row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, PyTree

from axcore.module import ContextError
from axcore.module.lifted import Body, Lifted


def in_pieces(fn: Body, size: int) -> Body:
    """Computes `fn(module, *args)` for at most `size` tokens of each row at a time. The backward pass recomputes each
    piece.

    A piece contains every n-th token of a row, so each piece is spread over all devices if rows are sharded.

    Args:
        fn: maps the module and arrays [batch, seq, ...] to a pytree of such arrays, token by token. Each piece draws
            different random numbers.
        size: number of tokens of a row that are computed at once.

    Raises:
        ContextError: `fn` adds a summary, loss or output, or writes a Variable.
    """

    def wrapped(module: nnx.Module, *args: jax.Array) -> PyTree[Array]:
        lifted = Lifted.of(module, "in_pieces")
        seq = args[0].shape[1]
        count = -(-seq // size)

        def split(x: jax.Array) -> jax.Array:  # [batch, seq, ...] -> [pieces, batch, size, ...]
            widths = [(0, -seq % count) if axis == 1 else (0, 0) for axis in range(x.ndim)]
            return rearrange(jnp.pad(x, widths), "b (s p) ... -> p b s ...", p=count)

        def joined(x: jax.Array) -> jax.Array:
            return rearrange(x, "p b s ... -> b (s p) ...")[:, :seq]

        @jax.checkpoint
        def body(numbered: tuple[jax.Array, tuple[jax.Array, ...]]) -> PyTree[Array]:
            number, pieces = numbered
            output, _, collections = lifted.call(fn, lifted.params, lifted.state, *pieces, number=number)
            lifted.refuse_written("in_pieces")
            if collections is not None:
                reports = {**collections.summaries, **collections.losses, **collections.outputs}
                if reports:
                    raise ContextError(
                        f"{lifted.caller.describe()}: the body of in_pieces reports {', '.join(sorted(reports))}, but "
                        f"only what it returns is kept. Return the values, and report them after in_pieces"
                    )
            return output

        pieces = tuple(split(x) for x in args)
        return jax.tree.map(joined, jax.lax.map(body, (jnp.arange(len(pieces[0])), pieces)))

    return wrapped
