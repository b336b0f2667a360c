"""The documents of packed rows, as layers that depend on earlier tokens see them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from axcore.nn.tokens import TokenInfo


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Documents:
    """The documents of the tokens of one block of rows.

    Attributes:
        numbers: int32, the number of the document of each token, ascending in a row. The first document has number 0
            and may continue earlier tokens of the row. None: all tokens of a row belong to it.
        valid: false at padding; None: there is no padding.
    """

    numbers: Int[Array, "batch seq"] | None = None
    valid: Bool[Array, "batch seq"] | None = None

    @classmethod
    def of(cls, tokens: TokenInfo, batch: int) -> Documents:
        """The documents of the tokens of `batch` rows. One begins where the segment differs from the previous one."""
        shape, segments = (batch, tokens.index.shape[1]), tokens.segment_ids
        valid = None if tokens.valid is None else jnp.broadcast_to(tokens.valid, shape)
        if segments is None:
            return cls(None, valid)
        begins = segments != jnp.concatenate([segments[:, :1], segments[:, :-1]], axis=1)
        if valid is not None:
            begins &= valid
        return cls(jnp.cumsum(begins, axis=1, dtype=jnp.int32), valid)

    def only_tokens(self, x: Shaped[Array, "batch seq ..."]) -> Shaped[Array, "batch seq ..."]:
        """`x` with zeros at padding."""
        return x if self.valid is None else jnp.where(self.valid.reshape(*self.valid.shape, *(1,) * (x.ndim - 2)), x, 0)

    def where_same(self, lag: int, x: Shaped[Array, "batch seq ..."]) -> Shaped[Array, "batch seq ..."]:
        """`x` with zeros at tokens whose document does not contain the token `lag` places earlier."""
        if self.numbers is None or lag == 0:
            return x
        before = jnp.pad(self.numbers, ((0, 0), (lag, 0)))[:, : x.shape[1]]
        same = before == self.numbers
        return jnp.where(same.reshape(*same.shape, *(1,) * (x.ndim - 2)), x, 0)
