"""An exponential moving average of the parameters (Polyak and Juditsky 1992; Karras et al. 2024, arXiv 2312.02696)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from axcore.config import Fraction
from axcore.module import Tree
from axcore.train import Callback


class EMA(Callback):
    """Keeps `average = decay * average + (1 - decay) * parameter` for each parameter, in float32 or wider. Parameters
    that are codes of a number format, such as integers and 8-bit floats, are copied.

    With `warmup`, the decay at step `t` is at most `(1 + t) / (10 + t)`, so that the initial parameters lose their
    weight quickly.
    """

    class Config(Callback.Config):
        decay: Fraction = 0.999
        warmup: bool = True

    config: Config

    def __init__(self, cfg: Config):
        super().__init__(cfg)

    def device_init(self, params: Tree) -> Tree:
        return {"params": jax.tree.map(_wide, params)}

    def device_update(self, state: Tree, params: Tree, step: jax.Array) -> Tree:
        decay = jnp.float32(self.config.decay)
        if self.config.warmup:
            decay = jnp.minimum(decay, (1.0 + step) / (10.0 + step))

        def moved(average: jax.Array, param: jax.Array) -> jax.Array:
            if _is_code(param):
                return param
            return decay.astype(average.dtype) * average + (1 - decay).astype(average.dtype) * param

        return {"params": jax.tree.map(moved, state["params"], params)}


def _wide(param: jax.Array) -> jax.Array:
    if _is_code(param):
        return param
    return param.astype(jnp.promote_types(param.dtype, jnp.float32))


def _is_code(param: jax.Array) -> bool:
    return not jnp.issubdtype(param.dtype, jnp.inexact) or param.dtype.itemsize == 1
