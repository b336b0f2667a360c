"""Text generation with a causal language model."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PRNGKeyArray
from numpy.typing import ArrayLike

from axcore.config import AxcoreError
from axcore.infer.adapters import Adapters
from axcore.infer.engine import Engine
from axcore.infer.grammar import Grammar, GrammarCompiler
from axcore.infer.requests import Request, SamplingOptions
from axcore.infer.sampling import NextToken, SamplingRows, sample, seed_words
from axcore.infer.speculation import Drafter
from axcore.module import Layer, Tree, functional
from axcore.nn import KVCache
from axcore.numerics import require_calibrated
from axcore.parallel import Layout

if TYPE_CHECKING:
    from axcore.train.data.tokenizers import Tokenizer


class Generator:
    """Continues prompts with a causal language model, one prompt at a time. Lengths are padded to powers of two, and
    each padded length compiles once.

    With a cache, it is an `Engine` of one row. Without one, it samples in the same way, so the same key gives the same
    tokens.

    Args:
        model: a model with the call signature of `axcore.nn.CausalLM`.
        context: the maximum number of tokens that the model attends to, at most the `seq_len` of its training.
        temperature: divides the logits; 0 selects the most likely token.
        cache: the KV cache, such as `ContiguousCache.Config()`. It limits prompt and sample together to `context`
            tokens. None: each new token recomputes the last `context` tokens, and the length is unlimited.
        eos_ids: tokens that end a sample.
        layout: the mesh and rules of the engine; None: a single device. It requires a cache.
        speculation: what proposes drafts (see `Engine.Config`); requires a cache.
        grammars: compiles grammars; requires a cache and the tokenizer.
        tokenizer: the tokenizer of the model, which grammars require.
        adapters: room for adapters (see `Engine.Config`); requires a cache.
    """

    def __init__(
        self,
        model: Layer,
        *,
        context: int,
        temperature: float = 1.0,
        cache: KVCache.Config | None = None,
        eos_ids: Collection[int] = (),
        layout: Layout | None = None,
        speculation: Drafter.Config | None = None,
        grammars: GrammarCompiler.Config | None = None,
        tokenizer: Tokenizer | None = None,
        adapters: Adapters.Config | None = None,
    ):
        if not temperature >= 0:
            raise AxcoreError(f"temperature must be 0 or more, not {temperature}")
        if context < 1:
            raise AxcoreError(f"context must be at least 1, not {context}")
        if layout is not None and cache is None:
            raise AxcoreError(
                "layout requires a cache. Pass one, such as ContiguousCache.Config(), or leave out layout"
            )
        if speculation is not None and cache is None:
            raise AxcoreError("speculation requires a cache, such as ContiguousCache.Config(), not None")
        if grammars is not None and cache is None:
            raise AxcoreError("grammars require a cache, such as ContiguousCache.Config(), not None")
        if adapters is not None and cache is None:
            raise AxcoreError("adapters require a cache, such as ContiguousCache.Config(), not None")
        require_calibrated(model)
        self.context, self.temperature, self.is_cached = context, temperature, cache is not None
        self._eos_ids = frozenset(eos_ids)
        self._fn, self._params, self._state = functional(model)
        row = jax.ShapeDtypeStruct((1, context), jnp.int32)  # raises here if the model does not support this length
        logits = jax.eval_shape(lambda ids: self._fn(self._params, self._state, ids)[0][0], row)
        self.vocab_size = getattr(model.config, "vocab_size", logits.shape[-1])
        if cache is None:
            self._sample = jax.jit(self._recomputed)
        else:
            size = context + 1
            cfg = Engine.Config(
                cache=cache,
                max_rows=1,
                max_len=size,
                step_tokens=size,
                speculation=speculation,
                grammars=grammars,
                adapters=adapters,
            )
            self._engine = cfg.build(model, tokenizer, eos_ids=self._eos_ids, layout=layout)
            weakref.finalize(self, self._engine.close)

    def load_adapter(self, name: str, source: Any) -> None:  # Any: as in `Engine.load_adapter`
        """Loads an adapter, see `Engine.load_adapter`.

        Raises:
            AxcoreError: the generator has no cache, or see there.
        """
        if not self.is_cached:
            raise AxcoreError(f"adapter {name!r} requires a cache, such as ContiguousCache.Config(), not None")
        self._engine.load_adapter(name, source)

    def __call__(
        self,
        prompt: Int[ArrayLike, " prompt"],
        *,
        num_tokens: int,
        key: PRNGKeyArray,
        grammar: Grammar | None = None,
        adapter: str | None = None,
    ) -> Int[np.ndarray, " tokens"]:
        """Samples tokens after a prompt.

        Args:
            prompt: token ids, at least one.
            num_tokens: number of tokens to sample.
            key: PRNG key of the sample.
            grammar: what the text of the sample must match; None: anything.
            adapter: the name of a loaded adapter; None: the model alone.

        Returns:
            `num_tokens` int32 tokens, or fewer if a token of `eos_ids` is sampled. That token is the last. A sample
            with a grammar ends without it where no text may follow.
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
        if grammar is not None and not self.is_cached:
            raise AxcoreError("grammar requires a cache, such as ContiguousCache.Config(), not None")
        if adapter is not None and not self.is_cached:
            raise AxcoreError(f"adapter {adapter!r} requires a cache, such as ContiguousCache.Config(), not None")
        if num_tokens == 0:
            return np.zeros((0,), np.int32)
        seed = int.from_bytes(np.asarray(jax.random.key_data(key)).astype(">u4").tobytes())  # n, if key is key(n)
        if self.is_cached:
            return self._with_cache(prompt, num_tokens, seed, grammar, adapter)
        start, stop = prompt.size, prompt.size + num_tokens
        row = np.zeros((max(1 << (stop - 1).bit_length(), self.context),), np.int32)
        row[:start] = prompt
        options = SamplingOptions(temperature=self.temperature)
        token = NextToken(options, seed_words(seed), position=0, num_output=0, slot=0)
        sampling = SamplingRows.of([token], vocab_size=self.vocab_size)
        new, end = self._sample(self._params, self._state, row, jnp.int32(start), jnp.int32(stop), sampling)
        found = np.asarray(new)[start : int(end)]
        if found[-1] < 0:
            raise AxcoreError("no token can be sampled: the logits are not finite. Check the weights")
        return found

    def _with_cache(
        self, prompt: np.ndarray, num_tokens: int, seed: int, grammar: Grammar | None, adapter: str | None
    ) -> np.ndarray:
        options = SamplingOptions(temperature=self.temperature, seed=seed, max_tokens=num_tokens, grammar=grammar)
        piece = self._engine.stream(Request(tuple(prompt.tolist()), options, adapter=adapter)).result()
        return np.asarray(piece.ids, np.int32)

    def _recomputed(
        self, params: Tree, state: Tree, row: jax.Array, start: jax.Array, stop: jax.Array, sampling: SamplingRows
    ) -> tuple[jax.Array, jax.Array]:
        def extend(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            row, at = carry
            first = jnp.maximum(at - self.context, 0)
            window = jax.lax.dynamic_slice(row, (first,), (self.context,))
            positions = jnp.minimum(jnp.arange(self.context, dtype=jnp.int32), at - first - 1)  # see Decoder
            (logits, _), _ = self._fn(params, state, window[None], positions=positions[None])
            ints = None if sampling.ints is None else jnp.asarray(sampling.ints).at[0, 2].set(at)  # the position
            found = sample(logits[:, at - first - 1], dataclasses.replace(sampling, ints=ints))
            return row.at[at].set(found.tokens[0]), at + 1

        carry = extend((row, start))
        return jax.lax.while_loop(lambda carry: self._goes_on(carry[0], carry[1], stop), extend, carry)

    def _goes_on(self, row: jax.Array, at: jax.Array, stop: jax.Array) -> jax.Array:
        """Whether a token is sampled at position `at`. -1 says that none can be."""
        ends = jnp.asarray([-1, *sorted(self._eos_ids)], jnp.int32)
        return (at < stop) & ~jnp.any(row[at - 1] == ends)


def generate(
    model: Layer,
    prompt: Int[ArrayLike, " prompt"],
    *,
    num_tokens: int,
    context: int,
    key: PRNGKeyArray,
    temperature: float = 1.0,
    cache: KVCache.Config | None = None,
    eos_ids: Collection[int] = (),
) -> Int[np.ndarray, " tokens"]:
    """Samples tokens after a prompt. For the arguments see `Generator`."""
    generator = Generator(model, context=context, temperature=temperature, cache=cache, eos_ids=eos_ids)
    return generator(prompt, num_tokens=num_tokens, key=key)
