"""Text generation with a causal language model."""

from __future__ import annotations

from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int, PRNGKeyArray
from numpy.typing import ArrayLike

from axcore.config import AxcoreError
from axcore.infer.decoder import Decoder, Step
from axcore.module import Tree, functional
from axcore.nn import KVCache
from axcore.numerics import require_calibrated

SMALLEST_BUCKET = 16
"""With a cache, prompts are padded to a power of two, at least this many tokens, which limits the number of
compilations."""


class Generator:
    """Continues prompts with a causal language model, one prompt at a time. Lengths are padded to powers of two, and
    each padded length compiles once.

    With a cache, a row that grows beyond a length in `Decoder.recompute_above` is computed once more.

    Args:
        model: a model with the call signature of `axcore.nn.CausalLM`.
        context: the maximum number of tokens that the model attends to, at most the `seq_len` of its training.
        temperature: divides the logits; 0 selects the most likely token.
        cache: the KV cache, such as `ContiguousCache.Config()`. It limits prompt and sample together to `context`
            tokens. None: each new token recomputes the last `context` tokens, and the length is unlimited.
        end_ids: tokens that end a sample.
    """

    def __init__(
        self,
        model: nnx.Module,
        *,
        context: int,
        temperature: float = 1.0,
        cache: KVCache.Config | None = None,
        end_ids: Collection[int] = (),
    ):
        if not temperature >= 0:
            raise AxcoreError(f"temperature must be 0 or more, not {temperature}")
        if context < 1:
            raise AxcoreError(f"context must be at least 1, not {context}")
        require_calibrated(model)
        self.context, self.temperature, self.is_cached = context, temperature, cache is not None
        self._end_ids = jnp.asarray(sorted(end_ids), jnp.int32)
        self._fn, self._params, self._state = functional(model)
        row = jax.ShapeDtypeStruct((1, context), jnp.int32)  # raises here if the model does not support this length
        logits = jax.eval_shape(lambda ids: self._fn(self._params, self._state, ids)[0][0], row)
        self.vocab_size = logits.shape[-1]
        if cache is not None:
            self._decoder, self._params, self._state = Decoder.of(model, cache=cache, batch_size=1, max_len=context)
        self._sample = jax.jit(self._cached if self.is_cached else self._recomputed, static_argnums=3)

    def __call__(
        self, prompt: Int[ArrayLike, " prompt"], *, num_tokens: int, key: PRNGKeyArray
    ) -> Int[np.ndarray, " tokens"]:
        """Samples tokens after a prompt.

        Args:
            prompt: token ids, at least one.
            num_tokens: number of tokens to sample.
            key: PRNG key of the sample.

        Returns:
            `num_tokens` int32 tokens, or fewer if a token of `end_ids` is sampled. That token is the last.
        """
        prompt = np.asarray(prompt)
        if prompt.ndim != 1 or not prompt.size:
            raise AxcoreError(f"prompt must have one dimension and at least one token, got shape {prompt.shape}")
        if num_tokens < 0:
            raise AxcoreError(f"num_tokens must be at least 0, not {num_tokens}")
        if self.is_cached and prompt.size + num_tokens > self.context:
            raise AxcoreError(
                f"a prompt of {prompt.size} tokens plus num_tokens={num_tokens} exceeds context={self.context}. "
                f"Increase context, reduce num_tokens or set cache=None"
            )
        if prompt.dtype.kind not in "iu" or prompt.min() < 0 or prompt.max() >= self.vocab_size:
            raise AxcoreError(
                f"prompt must contain token ids from 0 to {self.vocab_size - 1}, got {prompt.min()} to {prompt.max()}"
            )
        if num_tokens == 0:
            return np.zeros((0,), np.int32)
        start, stop = prompt.size, prompt.size + num_tokens
        row = np.zeros((self.context if self.is_cached else max(1 << (stop - 1).bit_length(), self.context),), np.int32)
        row[:start] = prompt
        limits = self._decoder.recompute_above if self.is_cached else ()
        cuts = [limit + 1 for limit in limits if start <= limit < stop - 1]
        end = start
        for cut in (*cuts, stop):  # after a cut, the row so far is a new prompt
            bucket = min(max(SMALLEST_BUCKET, 1 << (end - 1).bit_length()), self.context) if self.is_cached else 0
            bounds = jnp.int32(end), jnp.int32(cut)
            new, reached = self._sample(self._params, self._state, row, bucket, *bounds, key)
            row, end = np.asarray(new), int(reached)
            if row[end - 1] in self._end_ids:
                break
        return row[start:end]

    def _cached(
        self, params: Tree, state: Tree, row: jax.Array, bucket: int, start: jax.Array, stop: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        first = jnp.zeros((1,), jnp.int32)
        prompt = Step(row[None, :bucket], first, lengths=start[None], logits_at=start[None, None] - 1)
        logits, state = self._decoder(params, state, prompt)
        row = row.at[start].set(self._pick(logits[0, 0], start, key))

        def extend(carry: tuple[Tree, jax.Array, jax.Array]) -> tuple[Tree, jax.Array, jax.Array]:
            state, row, at = carry
            token = jax.lax.dynamic_slice(row, (at - 1,), (1,))
            logits, state = self._decoder(params, state, Step(token[None], at[None] - 1))
            return state, row.at[at].set(self._pick(logits[0, 0], at, key)), at + 1

        carry = state, row, start + 1
        return jax.lax.while_loop(lambda carry: self._goes_on(carry[1], carry[2], stop), extend, carry)[1:]

    def _recomputed(
        self, params: Tree, state: Tree, row: jax.Array, bucket: int, start: jax.Array, stop: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def extend(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            row, at = carry
            first = jnp.maximum(at - self.context, 0)
            window = jax.lax.dynamic_slice(row, (first,), (self.context,))
            positions = jnp.minimum(jnp.arange(self.context, dtype=jnp.int32), at - first - 1)  # see Decoder
            (logits, _), _ = self._fn(params, state, window[None], positions=positions[None])
            return row.at[at].set(self._pick(logits[0, at - first - 1], at, key)), at + 1

        carry = extend((row, start))
        return jax.lax.while_loop(lambda carry: self._goes_on(carry[0], carry[1], stop), extend, carry)

    def _goes_on(self, row: jax.Array, at: jax.Array, stop: jax.Array) -> jax.Array:
        """Whether a token is sampled at position `at`."""
        return (at < stop) & ~jnp.any(row[at - 1] == self._end_ids)

    def _pick(self, logits: jax.Array, at: jax.Array, key: jax.Array) -> jax.Array:
        """Samples the token at position `at` from its logits [vocab]."""
        if self.temperature == 0:
            return jnp.argmax(logits).astype(jnp.int32)
        key = jax.random.fold_in(key, at)
        return jax.random.categorical(key, logits / self.temperature).astype(jnp.int32)


def generate(
    model: nnx.Module,
    prompt: Int[ArrayLike, " prompt"],
    *,
    num_tokens: int,
    context: int,
    key: PRNGKeyArray,
    temperature: float = 1.0,
    cache: KVCache.Config | None = None,
    end_ids: Collection[int] = (),
) -> Int[np.ndarray, " tokens"]:
    """Samples tokens after a prompt. For the arguments see `Generator`."""
    generator = Generator(model, context=context, temperature=temperature, cache=cache, end_ids=end_ids)
    return generator(prompt, num_tokens=num_tokens, key=key)
