"""The activation functions that configs may name."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from axcore.config import register

for _name in ("celu", "elu", "gelu", "hard_swish", "leaky_relu", "mish", "relu", "relu6", "selu", "sigmoid", "silu"):
    register(getattr(jax.nn, _name), f"jax.nn.{_name}")
register(jax.numpy.tanh, "jax.numpy.tanh")


def exact_gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x * Phi(x)`, computed with the error function; `jax.nn.gelu` uses the tanh approximation by default."""
    return jax.nn.gelu(x, approximate=False)


register(exact_gelu, "axcore.nn.exact_gelu")


def squared_relu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`max(x, 0) ** 2` (So et al. 2021, arXiv 2109.08668, section 4.2)."""
    return jax.numpy.square(jax.nn.relu(x))


register(squared_relu, "axcore.nn.squared_relu")
