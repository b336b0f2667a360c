"""Generating text with a causal language model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import ArrayLike

from axcore.config import AxcoreError
from axcore.infer.decoder import Decoder
from axcore.module import Functional, Tree, functional
from axcore.nn import KVCache

Pick = Callable[[jax.Array, Any], jax.Array]
"""(logits of one token [vocab_size], its place in the row) -> the token, an int scalar."""


def generate(
    model: nnx.Module,
    prompt: ArrayLike,
    *,
    num_tokens: int,
    context: int,
    key: jax.Array,
    temperature: float = 1.0,
    cache: KVCache.Config | None = None,
) -> np.ndarray:
    """Samples tokens after a prompt, one at a time.

    Args:
        model: called as `axcore.nn.CausalLM` is.
        prompt: int [prompt_len], at least one token.
        num_tokens: how many to sample.
        context: tokens that the model sees at once; no more than it was trained on.
        temperature: divides the logits; 0 takes the likeliest token.
        cache: keeps the keys and values of earlier tokens, as in `cache=ContiguousCache.Config()`; prompt and sample
            must fit into `context` together. None: each token is computed anew from the `context` tokens before it,
            which may go on for ever.

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
    if cache is not None and prompt.size + num_tokens > context:
        raise AxcoreError(
            f"{prompt.size} tokens of prompt and {num_tokens} more do not fit into context={context}; with a cache "
            f"they must"
        )
    fn, params, state = functional(model)
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    vocab_size = jax.eval_shape(lambda ids: fn(params, state, ids)[0][0], one).shape[-1]
    if prompt.dtype.kind not in "iu" or prompt.min() < 0 or prompt.max() >= vocab_size:
        raise AxcoreError(f"a prompt holds token ids from 0 to {vocab_size - 1}; got {prompt.min()} to {prompt.max()}")
    if num_tokens == 0:
        return np.zeros((0,), np.int32)
    row = jnp.zeros((max(prompt.size + num_tokens, context),), jnp.int32).at[: prompt.size].set(prompt.astype(np.int32))
    pick = functools.partial(_pick, key=key, temperature=None if temperature == 0 else jnp.float32(temperature))
    start, stop = prompt.size, prompt.size + num_tokens
    if cache is None:
        sample = jax.jit(functools.partial(_recomputed, fn, pick=pick, context=context, start=start, stop=stop))
    else:
        decoder, params, state = Decoder.of(model, cache=cache, batch_size=1, max_len=context)
        sample = jax.jit(functools.partial(_cached, decoder, pick=pick, start=start, stop=stop))
    return np.asarray(sample(params, state, row)[start:stop])


def _pick(logits: jax.Array, at: Any, *, key: jax.Array, temperature: jax.Array | None) -> jax.Array:
    if temperature is None:
        return jnp.argmax(logits).astype(jnp.int32)
    return jax.random.categorical(jax.random.fold_in(key, at), logits / temperature).astype(jnp.int32)


def _recomputed(
    fn: Functional, params: Tree, state: Tree, row: jax.Array, *, pick: Pick, context: int, start: int, stop: int
) -> jax.Array:
    def extend(at: jax.Array, row: jax.Array) -> jax.Array:
        first = jnp.maximum(at - context, 0)
        window = jax.lax.dynamic_slice(row, (first,), (context,))
        (logits, _), _ = fn(params, state, window[None])
        return row.at[at].set(pick(logits[0, at - first - 1], at))

    return jax.lax.fori_loop(start, stop, extend, row)


def _cached(
    decoder: Decoder, params: Tree, state: Tree, row: jax.Array, *, pick: Pick, start: int, stop: int
) -> jax.Array:
    logits, state = decoder(params, state, row[None, :start], jnp.arange(start, dtype=jnp.int32)[None])
    row = row.at[start].set(pick(logits[0, -1], start))

    def extend(at: jax.Array, carry: tuple[Tree, jax.Array]) -> tuple[Tree, jax.Array]:
        state, row = carry
        token = jax.lax.dynamic_slice(row, (at - 1,), (1,))
        logits, state = decoder(params, state, token[None], jnp.full((1, 1), at - 1, jnp.int32))
        return state, row.at[at].set(pick(logits[0, -1], at))

    return jax.lax.fori_loop(start + 1, stop, extend, (state, row))[1]
