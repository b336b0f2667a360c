"""Embeddings of prompts: hidden states of the last layer, pooled over the tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from axcore.infer.requests import Pooling


def chunk_states(hidden: Float[Array, "width embed"], length: Int[Array, ""]) -> Float[Array, "2 embed"]:
    """What every pooling needs of a chunk of a prompt: the float32 sum of its hidden states, and its last one.

    Args:
        hidden: the hidden states of the tokens, arbitrary from `length` on.
        length: the number of tokens.
    """
    hidden = hidden.astype(jnp.float32)
    valid = (jnp.arange(hidden.shape[0]) < length)[:, None]
    last = jax.lax.dynamic_index_in_dim(hidden, jnp.maximum(length - 1, 0), keepdims=False)
    return jnp.stack([jnp.where(valid, hidden, 0).sum(axis=0), last])


class PooledStates:
    """The hidden states of a prompt, pooled while its chunks are computed in their order."""

    def __init__(self, pooling: Pooling):
        self._is_mean = pooling == "mean"
        self._sum: Float[np.ndarray, " embed"] | None = None
        self._last: Float[np.ndarray, " embed"] | None = None

    def add(self, states: Float[np.ndarray, "2 embed"], *, start: int) -> None:
        """Adds a chunk of the prompt. One that starts the prompt again replaces all others.

        Args:
            states: the result of `chunk_states`.
            start: the position of its first token.
        """
        total, self._last = states.astype(np.float64)
        self._sum = total if self._sum is None or start == 0 else self._sum + total

    def embedding(self, num_tokens: int) -> Float[np.ndarray, " embed"]:
        """The float32 embedding of a prompt of `num_tokens` tokens whose last chunk was added."""
        assert self._sum is not None and self._last is not None, "no chunk of the prompt was added"
        return (self._sum / num_tokens if self._is_mean else self._last).astype(np.float32)


def normalized(embedding: Float[np.ndarray, " embed"]) -> Float[np.ndarray, " embed"]:
    """The embedding with length 1; zeros stay zeros."""
    length = float(np.linalg.norm(embedding.astype(np.float64)))
    return embedding if length == 0 else (embedding / length).astype(np.float32)
