"""The layer in which the tokens of one batch use different adapters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import axcore as ax
from axcore.nn import ADAPTERS, PerToken
from axcore.numerics import Product


class SlotArray(nnx.Variable[jax.Array]):
    """The values of the adapters in all slots of a layer."""


class LoRASlots(ax.Layer):
    """`y + (x A_s) B_s`, where s is the slot of each token, for the adapter slot of a linear layer.

    The arrays are state, not parameters: `a`, [input_dim, slot, rank], and `b`, [slot, rank, output_dim], with the
    scale of the adapter. They are zero at first. Slots are not the leading axis of `a`, so that the products with all
    slots are one product with a matrix of `slots * rank` columns, of which each token keeps those of its slot.
    """

    class Config(ax.Layer.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED
        output_dim: ax.PositiveInt = ax.REQUIRED
        groups: ax.PositiveInt | None = None
        """Number of groups of a grouped weight, which is not supported."""
        axes: tuple[str | None, ...] | None = None
        """Logical axes of the weight."""
        slots: ax.PositiveInt = ax.REQUIRED
        rank: ax.PositiveInt = ax.REQUIRED
        """The largest rank of an adapter. The smaller width of the weight is used if it is less."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        del rngs
        *_, into, out_of = cfg.axes or (None, None)
        rank, dtype = min(cfg.rank, cfg.input_dim, cfg.output_dim), self.dtypes.compute
        self.a = SlotArray(jnp.zeros((cfg.input_dim, cfg.slots, rank), dtype), axes=(into, None, None))
        self.b = SlotArray(jnp.zeros((cfg.slots, rank, cfg.output_dim), dtype), axes=(None, None, out_of))

    def __call__(
        self,
        x: Float[Array, "*tokens input_dim"],
        y: Float[Array, "*tokens output_dim"],
        weight: Float[Array, "input_dim output_dim"],
        product: Product,
    ) -> Float[Array, "*tokens output_dim"]:
        """Adds to the product y of each token the change by the adapter of the token.

        Raises:
            ConfigError: x has other rows than the tokens of the call.
        """
        del weight
        shared: PerToken | None = self.frame.shared.get(ADAPTERS)
        if shared is None:
            return y
        slot, tokens = shared.values, x.shape[:-1]
        if tokens not in (slot.shape, (slot.size,)):
            raise ax.ConfigError(
                f"{self.frame.path}: an adapter for each token requires inputs of the {slot.size} tokens, got shape "
                f"{list(x.shape)}. This layer also multiplies other rows. Exclude it, for example with "
                f"engine.adapters.exclude=('**.{self.frame.path.split('.')[-2]}',)"
            )
        a, b, accumulate = self.a[...], self.b[...], self.dtypes.accumulate
        narrow = product(x, a.reshape(a.shape[0], -1), accumulate).astype(x.dtype)
        mine = slot.reshape(*tokens, 1, 1) == jnp.arange(a.shape[1])[:, None]
        narrow = jnp.where(mine, narrow.reshape(*tokens, *a.shape[1:]), 0).reshape(*tokens, -1)
        return y + product(narrow, b.reshape(-1, b.shape[-1]), accumulate).astype(y.dtype)
