"""Generating text with a causal language model."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import ArrayLike

from axcore.config import AxcoreError
from axcore.module import Functional, Tree, functional


def generate(
    model: nnx.Module,
    prompt: ArrayLike,
    *,
    num_tokens: int,
    context: int,
    key: jax.Array,
    temperature: float = 1.0,
) -> np.ndarray:
    """Samples tokens after a prompt, one at a time, each from a window of the `context` tokens before it.

    Args:
        model: called as `axcore.nn.CausalLM` is.
        prompt: int [prompt_len], at least one token.
        num_tokens: how many to sample.
        context: tokens that the model sees at once; no more than it was trained on.
        temperature: divides the logits; 0 takes the likeliest token.

    Returns:
        int32 [num_tokens].
    """
    prompt = np.asarray(prompt)
    if prompt.ndim != 1 or not prompt.size:
        raise AxcoreError(f"a prompt is a row of at least one token, not an array of shape {prompt.shape}")
    if not temperature >= 0:
        raise AxcoreError(f"temperature must be 0 or more, not {temperature}")
    if context < 1 or num_tokens < 0:
        raise AxcoreError(f"context must be at least 1 and num_tokens at least 0, not {context} and {num_tokens}")
    fn, params, state = functional(model)
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    vocab_size = jax.eval_shape(lambda ids: fn(params, state, ids)[0][0], one).shape[-1]
    if prompt.dtype.kind not in "iu" or prompt.min() < 0 or prompt.max() >= vocab_size:
        raise AxcoreError(f"a prompt holds token ids from 0 to {vocab_size - 1}; got {prompt.min()} to {prompt.max()}")
    row = jnp.zeros((max(prompt.size + num_tokens, context),), jnp.int32).at[: prompt.size].set(prompt.astype(np.int32))
    sample = jax.jit(functools.partial(_sample, fn), static_argnames=("start", "num_tokens", "context", "greedy"))
    row = sample(
        params,
        state,
        row,
        key,
        jnp.float32(temperature or 1.0),
        start=prompt.size,
        num_tokens=num_tokens,
        context=context,
        greedy=temperature == 0,
    )
    return np.asarray(row[prompt.size : prompt.size + num_tokens])


def _sample(
    fn: Functional,
    params: Tree,
    state: Tree,
    row: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    *,
    start: int,
    num_tokens: int,
    context: int,
    greedy: bool,
) -> jax.Array:
    def extend(at: jax.Array, row: jax.Array) -> jax.Array:
        first = jnp.maximum(at - context, 0)
        window = jax.lax.dynamic_slice(row, (first,), (context,))
        (logits, _), _ = fn(params, state, window[None])
        logits = logits[0, at - first - 1]
        token = (
            jnp.argmax(logits) if greedy else jax.random.categorical(jax.random.fold_in(key, at), logits / temperature)
        )
        return row.at[at].set(token.astype(row.dtype))

    return jax.lax.fori_loop(start, start + num_tokens, extend, row)
