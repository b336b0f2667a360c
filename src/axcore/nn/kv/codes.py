"""Keys and values as int8 or float8 codes, with one scale for each token and head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

Scales = tuple[Float[Array, "*places kv_head"], Float[Array, "*places kv_head"] | None]
"""The float32 scales of keys and of values. Values without features have none."""


def encoded(
    x: Float[Array, "*places kv_head dim"], dtype: DTypeLike
) -> tuple[Num[Array, "*places kv_head dim"], Float[Array, "*places kv_head"]]:
    """Codes and float32 scales with `x ~ codes * scale`. The largest number of a head gets the largest code.

    Args:
        dtype: dtype of the codes, int8 or a float8 dtype.
    """
    dtype = jnp.dtype(dtype)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    highest = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    scales = jnp.abs(x).max(axis=-1, initial=0) / highest
    ratio = x / jnp.where(scales == 0, 1, scales)[..., None]
    # Rounding may exceed the largest code, which float8_e4m3fn would turn into NaN.
    codes = jnp.clip(jnp.round(ratio) if is_integer else ratio, -highest, highest)
    return codes.astype(dtype), scales


def decoded(
    pair: tuple[Num[Array, "*places kv_head head_dim"], Num[Array, "*places kv_head value_dim"]],
    scales: Scales | None,
    dtype: DTypeLike,
) -> tuple[Float[Array, "*places kv_head head_dim"], Float[Array, "*places kv_head value_dim"]]:
    """Keys and values in `dtype`, from codes and scales, or from plain numbers if `scales` is None."""

    def read(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        return (x if scale is None else x.astype(jnp.float32) * scale[..., None]).astype(dtype)

    (k, v), (k_scale, v_scale) = pair, scales or (None, None)
    return read(k, k_scale), read(v, v_scale)
