"""The base of drafters that run a model with decoding state of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from axcore.config import ConfigError
from axcore.infer.decoding.decoder import Decoder
from axcore.infer.decoding.step import Step
from axcore.infer.requests import SamplingOptions
from axcore.infer.sampling import Counts, Method, NextToken, SamplingRows, sample
from axcore.infer.sampling.rows import NO_SLOT, PADDING
from axcore.infer.sequences import Sequence
from axcore.infer.speculation.drafter import Drafter, Drafts, Target
from axcore.module import Layer, Tree
from axcore.nn import ContiguousCache, KVCache

WIDTHS = (16, 64, 256)
"""The numbers of tokens to which chunks of prompts are padded."""


class ModelDrafter(Drafter):
    """Drafts the tokens that a model samples with the random numbers and options of the request.

    Two models agree on a token more often if they use the same random numbers for it. Penalties, `min_tokens` and
    grammars have no effect on drafts.

    Args:
        target: the model whose tokens it predicts.
        model: the model that drafts, with the call signature of `axcore.nn.CausalLM`.
        num_new: the largest number of tokens of a row that the model computes for drafts; more are computed before, in
            chunks, as those of a prompt are.
    """

    class Config(Drafter.Config):
        cache: KVCache.Config = ContiguousCache.Config()
        """Fills the cache slots of the model that drafts."""

    config: Config
    shift: ClassVar[int] = 0
    """The index of the token of a sequence that is the first one in the row of the model."""
    keeps_drafts: ClassVar[bool] = True
    """Whether what the model computes for accepted drafts is what it would compute for known tokens."""

    def __init__(self, cfg: Config, target: Target, model: Layer, num_new: int):
        super().__init__(cfg, target)
        self._vocab_size, self._num_new = target.vocab_size, num_new
        self._decoder, self._params, self._state = Decoder.of(
            model,
            cache=cfg.cache,
            batch_size=target.decoder.batch_size,
            max_len=target.decoder.max_len + cfg.num_speculative_tokens,
            layout=target.decoder.layout,
            max_rollback=cfg.num_speculative_tokens,
        )
        check_decoder(cfg, self._decoder, target.decoder.max_len)
        self._rows: dict[int, _Row] = {}
        self._prefill = jax.jit(self._trace_prefill, donate_argnums=1)
        self._draft = jax.jit(self._trace_draft, donate_argnums=1)

    def propose(self, sequences: Iterable[Sequence], seeds: Mapping[int, tuple[int, int]]) -> Drafts:
        """See `Drafter`."""
        size, asked = self._decoder.batch_size, [(each, *self._caught_up(each)) for each in sequences]
        ids, ints, tokens = np.zeros((size, self._num_new), np.int32), np.zeros((size, 2), np.int32), [PADDING] * size
        for each, slot, row in asked:
            new = each.tokens[self.shift + row.num_cached :]
            ids[slot, : len(new)], ints[slot] = new, (row.num_cached, len(new))
            tokens[slot] = NextToken(row.options, seeds[each.id], len(each.tokens), 0, NO_SLOT)
        found = self._drafted(ids, ints, tokens)
        drafts = {}
        for each, slot, row in asked:
            row.num_cached = len(each.tokens) - self.shift
            row.drafts = tuple(found[slot, :-1].tolist()) if self.keeps_drafts else ()
            drafts[each.id] = tuple(found[slot, : int((found[slot] >= 0).cumprod().sum())].tolist())
        return drafts

    def warm_up(self, methods: Iterable[Method]) -> None:
        """See `Drafter`."""
        size = self._decoder.batch_size
        for method in methods:
            ids = np.zeros((size, self._num_new), np.int32)
            self._drafted(ids, np.zeros((size, 2), np.int32), [PADDING] * size, method)
        for width in WIDTHS:
            self._computed(size, 0, [], width)

    def close(self) -> None:
        """See `Drafter`."""
        del self._params, self._state

    def inputs(self) -> Tree:
        """Arrays that `prepared` needs, besides the state of the model."""
        return {}

    def prepared(self, state: Tree, inputs: Tree, step: Step) -> Tree:
        """The state of the model before a step, as a pure function."""
        return state

    def _caught_up(self, sequence: Sequence) -> tuple[int, _Row]:
        """The slot and the row of a sequence, of whose tokens at least one and at most `num_new` are not cached."""
        slot, tokens = sequence.slot, sequence.tokens[self.shift :]
        assert slot is not None
        row = self._rows.get(slot)
        if row is None or row.id != sequence.id:
            row = self._rows[slot] = _Row(sequence.id, _options(sequence.request.options))
        if row.num_cached >= len(tokens):  # it lost its row after earlier drafts, and has no new token since
            row.num_cached, row.drafts = len(tokens) - 1, ()
        for draft in row.drafts:
            if row.num_cached == len(tokens) - 1 or tokens[row.num_cached] != draft:
                break
            row.num_cached += 1
        row.drafts = ()
        while len(tokens) - row.num_cached > self._num_new:
            chunk = tokens[row.num_cached : min(row.num_cached + WIDTHS[-1], len(tokens) - 1)]
            width = next(width for width in WIDTHS if width >= len(chunk))
            self._computed(slot, row.num_cached, chunk, width)
            row.num_cached += len(chunk)
        return slot, row

    def _computed(self, slot: int, start: int, chunk: list[int], width: int) -> None:
        ids, ints = np.zeros((1, width), np.int32), np.array([[start, len(chunk), slot]], np.int32)
        ids[0, : len(chunk)] = chunk
        self._state = self._prefill(self._params, self._state, self.inputs(), ids, ints)

    def _drafted(
        self, ids: np.ndarray, ints: np.ndarray, tokens: list[NextToken], method: Method | None = None
    ) -> Int32[np.ndarray, "rows drafts"]:
        rows = SamplingRows.of(tokens, vocab_size=self._vocab_size, method=method)
        found, self._state = self._draft(self._params, self._state, self.inputs(), ids, ints, rows)
        return np.asarray(found)

    def _trace_prefill(self, params: Tree, state: Tree, inputs: Tree, ids: jax.Array, ints: jax.Array) -> Tree:
        self.num_traced += 1
        start, lengths, slots = jnp.moveaxis(jnp.asarray(ints), 1, 0)
        at = jnp.maximum(lengths - 1, 0)[:, None]
        step = Step(jnp.asarray(ids), start, lengths, slots, at, phase="prefill")
        return self._decoder(params, self.prepared(state, inputs, step), step)[1]

    def _trace_draft(
        self, params: Tree, state: Tree, inputs: Tree, ids: jax.Array, ints: jax.Array, rows: SamplingRows
    ) -> tuple[Int32[Array, "rows drafts"], Tree]:
        """Computes the new tokens of all rows, and then one draft after another."""
        self.num_traced += 1
        start, lengths = jnp.moveaxis(jnp.asarray(ints), 1, 0)
        start = jnp.where(lengths > 0, start, state["lengths"])  # a slot without new tokens keeps its row
        at = jnp.maximum(lengths - 1, 0)[:, None]
        step = Step(jnp.asarray(ids), start, lengths, logits_at=at, phase="decode")
        logits, state = self._decoder(params, self.prepared(state, inputs, step), step)
        counts = Counts.zeros(1, logits.shape[-1])

        def drawn(logits: jax.Array, ahead: jax.Array | int) -> jax.Array:
            ints = None if rows.ints is None else jnp.asarray(rows.ints).at[:, 2].add(ahead)  # the position
            return sample(logits[:, 0], dataclasses.replace(rows, ints=ints), counts).tokens

        def extended(carry: tuple[Tree, jax.Array], ahead: jax.Array) -> tuple[tuple[Tree, jax.Array], jax.Array]:
            state, token = carry
            ids = jnp.maximum(token, 0)[:, None]
            step = Step(ids, state["lengths"], jnp.minimum(lengths, 1), phase="decode")
            logits, state = self._decoder(params, state, step)
            token = drawn(logits, ahead)
            return (state, token), token

        first = drawn(logits, 0)
        ahead = jnp.arange(1, self.config.num_speculative_tokens)
        (state, _), more = jax.lax.scan(extended, (state, first), ahead)
        return jnp.concatenate([first[:, None], more.T], axis=1), state


def check_decoder(cfg: ModelDrafter.Config, decoder: Decoder, max_len: int) -> None:
    """Checks that a decoder can draft for rows of at most `max_len` tokens.

    Raises:
        ConfigError: its keys change before, or it cannot drop rejected drafts.
    """
    limit = min(decoder.recompute_above, default=decoder.max_len)
    if limit < max_len:
        raise ConfigError(
            f"engine.speculation: the keys of the draft model change when a row passes {limit} tokens. Set max_len "
            f"to at most {limit}, or use another drafter, such as ngram"
        )
    most = decoder.max_rollback
    if most is not None and most < cfg.num_speculative_tokens:
        raise ConfigError(
            f"engine.speculation.num_speculative_tokens={cfg.num_speculative_tokens}: {decoder.least_rollback_in} of "
            f"the draft model can drop at most {most} tokens of a row, such as rejected drafts. Use a draft model with "
            f"KV caches in all layers"
        )


@dataclasses.dataclass
class _Row:
    """The tokens of a slot in the caches of the model.

    Attributes:
        id: the sequence that they belong to.
        options: how its drafts are sampled.
        num_cached: the number of its known tokens in the caches.
        drafts: the drafts after them in the caches.
    """

    id: int
    options: SamplingOptions
    num_cached: int = 0
    drafts: tuple[int, ...] = ()


def _options(options: SamplingOptions) -> SamplingOptions:
    """The options that have an effect on drafts."""
    return SamplingOptions(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        logit_bias=options.logit_bias,
    )
