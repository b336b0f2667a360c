"""The activation functions that configs may name."""

from __future__ import annotations

import jax

from axcore.config import register

for _name in ("celu", "elu", "gelu", "hard_swish", "leaky_relu", "mish", "relu", "relu6", "selu", "sigmoid", "silu"):
    register(getattr(jax.nn, _name), f"jax.nn.{_name}")
register(jax.numpy.tanh, "jax.numpy.tanh")


def exact_gelu(x: jax.Array) -> jax.Array:
    """`x * Phi(x)`, by the error function; `jax.nn.gelu` approximates it by tanh."""
    return jax.nn.gelu(x, approximate=False)


register(exact_gelu, "axcore.nn.exact_gelu")
