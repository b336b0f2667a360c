"""The base of numerics that round the weight."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jaxtyping import Array, Float, Int

from axcore.numerics import Numerics, Weight, gather


class StraightThrough(Numerics):
    """Numerics whose products use the weight as `encode` rounds it, while it is a float parameter, too.

    The backward pass treats rounding as the identity (Bengio et al. 2013, arXiv 1308.3432). Subclasses define `encode`
    and `decode`, for any leading dimensions.
    """

    def rounded(self, weight: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """The weight after rounding, in its dtype. Its gradient is that of `weight`."""
        return weight + jax.lax.stop_gradient(self.decode(self.encode(weight)).astype(weight.dtype) - weight)

    def matrix(self, weight: Weight) -> Float[Array, "*shape"]:
        return self.decode(weight) if isinstance(weight, Mapping) else self.rounded(weight)

    def gather(self, ids: Int[Array, "*shape"], weight: Weight) -> Float[Array, "*shape features"]:
        """Rounds only the selected rows, since scales of an embedding never span rows."""
        if isinstance(weight, Mapping):
            return super().gather(ids, weight)
        dtype = self.dtypes.compute or weight.dtype
        return self.rounded(gather(weight, ids, weight.dtype)).astype(dtype)
