"""The compiled programs of an engine: the model on some rows, and the sampling of their next tokens."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Float, Int

from axcore.infer.adapters import Adapters
from axcore.infer.decoding.decoder import Decoder
from axcore.infer.decoding.step import Step
from axcore.infer.embeddings import chunk_states
from axcore.infer.execution.batches import Batch, ModelCall
from axcore.infer.execution.compiling import Compiler
from axcore.infer.sampling import (
    Counts,
    LogProbs,
    Method,
    NextToken,
    Sampled,
    SamplingRows,
    Verified,
    log_probabilities,
    sample,
    verify,
)
from axcore.infer.sampling.rows import USUAL_LOGPROBS
from axcore.module import Tree
from axcore.nn import Phase
from axcore.parallel import constrain


class Programs:
    """The model and the sampler, compiled once for each bucket, and the device state that they update in place.

    Args:
        decoder: the model.
        params: its parameters.
        state: its decoding state, which the programs take over.
        vocab_size: the number of token ids; None: the size of the logits, which may have more columns as padding.
        eos_ids: the tokens that `min_tokens` excludes.
        adapters: the adapters of the decoder; None: it has none.

    Attributes:
        state: the decoding state. A program that takes it as a donated argument sets the new one.
        compiler: compiles the programs for later calls of the methods.
        state_shapes: the shapes of the state of the model.
        num_traced: the number of programs that were compiled.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: Tree,
        state: Tree,
        vocab_size: int | None,
        *,
        eos_ids: Collection[int] = (),
        adapters: Adapters | None = None,
    ):
        self.decoder, self.num_traced, self._adapters, self._eos_ids = decoder, 0, adapters, eos_ids
        self.state_shapes: Tree = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state["model"])
        self._params, self.state = params, state
        row, table = jnp.zeros((1,), jnp.int32), jnp.zeros((1, 1), jnp.int32)
        one = Step(
            table,
            start=row,
            lengths=row,
            slots=row,
            pages=None if decoder.paging is None else table,
            adapters=None if adapters is None else row,
        )
        logits = jax.eval_shape(decoder, params, state, one)[0]
        self._columns, self._logits_dtype = logits.shape[-1], logits.dtype
        self.vocab_size = self._columns if vocab_size is None else vocab_size
        self._last = jnp.zeros((decoder.batch_size,), jnp.int32)
        self._counts = Counts.zeros(decoder.batch_size, self._columns)
        self._logits: dict[tuple[int, ...], jax.Array] = {}
        self._device: jax.sharding.Sharding | None = None
        self._commit()
        self.compiler = Compiler()
        jit = self.compiler.jit
        self._model = jit(self._trace_model, donate_argnums=(1, 2), keep_unused=True)
        self._model_of_drafts = jit(self._trace_model_of_drafts, donate_argnums=(1, 2), keep_unused=True)
        self._verifier = jit(self._trace_verifier, donate_argnums=(1, 2))
        self._scorer = jit(self._trace_scorer, donate_argnums=1)
        self._embedder = jit(self._trace_embedder, donate_argnums=1)
        self._sampler = jit(self._trace_sampler, donate_argnums=(1, 2))
        self._counter = jit(self._trace_counter, donate_argnums=0)
        self._adapter_writer = jit(self._trace_adapter_writer, donate_argnums=0)

    def _commit(self) -> None:
        """Puts all arrays where the programs return them. Otherwise jax compiles a program again when the results of
        earlier calls replace the first arrays."""
        if self.decoder.layout is not None:
            everywhere = NamedSharding(self.decoder.layout.mesh, PartitionSpec())
            self._last, self._counts = jax.device_put((self._last, self._counts), everywhere)
            return
        shardings = {leaf.sharding for leaf in jax.tree.leaves(self._params)}
        if len(shardings) == 1 and isinstance(device := shardings.pop(), SingleDeviceSharding):
            self._device, held = device, (self._params, self.state, self._last, self._counts)
            self._params, self.state, self._last, self._counts = jax.device_put(held, device)

    def logits(self, call: ModelCall) -> Float[Array, "rows vocab"]:
        """Runs the model.

        Returns:
            The logits of the last new token of each row; NaN in padding rows. The next call with as many rows donates
            them, so programs that read them must be called before it.
        """
        buffer = self._logits_buffer(call.num_logits)
        logits, self.state = self._model(self._params, self.state, buffer, self._last, call.blocks, call.at)
        self._logits[call.num_logits,] = logits
        return logits

    def _logits_buffer(self, *rows: int) -> Float[Array, "*rows vocab"]:
        """The logits of the last call with this number of rows, and of tokens of a row with drafts. They are donated,
        so that the next ones have the same address.

        XLA keeps activations where it writes the logits later, and a CUDA graph holds the addresses of its kernels. If
        the logits moved, the host would update most kernels of the graph before each step, which takes longer than the
        step of a small model.
        """
        if rows not in self._logits:
            zeros = jax.jit(lambda: self._sharded(jnp.zeros((*rows, self._columns), self._logits_dtype)))()
            self._logits[rows] = zeros if self._device is None else jax.device_put(zeros, self._device)
        return self._logits[rows]

    def _sharded(self, logits: Float[Array, "*rows vocab"]) -> Float[Array, "*rows vocab"]:
        """Logits in one sharding, which is that of the buffer, so that it can be donated."""
        if self.decoder.layout is None:
            return logits
        with self.decoder.layout.active():
            return constrain(logits, "batch", *(None,) * (logits.ndim - 2), "vocab")

    def scored(self, rows: Batch, targets: Int[np.ndarray, "1 width"]) -> tuple[Float[Array, "1 vocab"], LogProbs]:
        """Runs the model on a chunk of a prompt.

        Args:
            rows: one row.
            targets: the token after each new token.

        Returns:
            The logits of the last new token, and the log-probabilities [width] of the targets.
        """
        logits, found, self.state = self._scorer(self._params, self.state, self._last, rows, targets)
        return logits, found

    def embedded(self, rows: Batch) -> Float[Array, "2 embed"]:
        """Runs the model on a chunk of a prompt, which is one row. For the result see `chunk_states`."""
        states, self.state = self._embedder(self._params, self.state, self._last, rows)
        return states

    def sampled(
        self, logits: Float[Array, "rows vocab"], tokens: Sequence[NextToken], method: Method | None = None
    ) -> Sampled:
        """Samples the next token of each row, and keeps it as the last one of its slot.

        Args:
            logits: the logits of each row.
            tokens: how the token of each row is sampled; `PADDING` for rows without a token.
            method: see `SamplingRows.of`.
        """
        slots, rows = np.array([token.slot for token in tokens], np.int32), self._sampling_rows(tokens, method)
        found, self._last, self._counts = self._sampler(logits, self._last, self._counts, slots, rows)
        return found

    def logits_of_drafts(self, rows: Batch) -> Float[Array, "rows width vocab"]:
        """Runs the model on the last token of each row and on its drafts.

        Returns:
            The logits of all tokens; NaN in padding. They are donated, as those of `logits`.
        """
        buffer = self._logits_buffer(*rows.ids.shape)
        logits, self.state = self._model_of_drafts(self._params, self.state, buffer, self._last, rows)
        self._logits[rows.ids.shape] = logits
        return logits

    def verified(
        self,
        logits: Float[Array, "rows width vocab"],
        drafts: Int[np.ndarray, "rows drafts"],
        tokens: Sequence[NextToken],
        method: Method | None = None,
    ) -> Verified:
        """Samples the next tokens of rows with drafts, and keeps the last one of each slot. See `verify`.

        Args:
            logits: the logits of the last token of each row and of its drafts.
            drafts: the drafts of each row; `NO_DRAFT` in place of missing ones.
            tokens: how the `width` tokens of each row are sampled, row by row.
            method: see `SamplingRows.of`.
        """
        slots = np.array([token.slot for token in tokens[:: logits.shape[1]]], np.int32)
        rows = self._sampling_rows(tokens, method)
        found, self._last, self._counts = self._verifier(logits, self._last, self._counts, drafts, slots, rows)
        return found

    def _sampling_rows(self, tokens: Sequence[NextToken], method: Method | None) -> SamplingRows:
        return SamplingRows.of(tokens, vocab_size=self.vocab_size, eos_ids=self._eos_ids, method=method)

    def count(self, slot: int, tokens: Sequence[int], num_prompt: int) -> None:
        """Counts the known tokens of a slot, for the penalties of its next tokens."""
        ids = np.zeros((1, self.decoder.max_len), np.int32)
        ids[0, : len(tokens)] = tokens
        self._counts = self._counter(self._counts, ids, np.array([[slot, num_prompt, len(tokens)]], np.int32))

    def write_adapter(self, arrays: Tree, slot: int) -> None:
        """Puts an adapter into a slot. Nothing is written if the slot is out of range."""
        self.state = self._adapter_writer(self.state, arrays, np.int32(slot))

    def warm_up_adapters(self) -> None:
        """Compiles `write_adapter`, if there is room for adapters."""
        if self._adapters is not None:
            self.write_adapter(self._adapters.empty(self.state_shapes), self._adapters.config.max_adapters)

    def free(self) -> None:
        """Waits for the device, which an interpreter that ends must not leave running, and frees its memory. No
        program may run afterwards."""
        with contextlib.suppress(RuntimeError):  # a step failed, or its arrays are gone
            jax.block_until_ready((self.state, self._last, self._counts))
        del self._params, self.state, self._last, self._counts, self._logits

    def _trace_model(
        self,
        params: Tree,
        state: Tree,
        buffer: jax.Array,
        last: jax.Array,
        blocks: Mapping[Phase, Batch],
        at: jax.Array | None,
    ) -> tuple[jax.Array, Tree]:
        del buffer  # donated: the logits are written to its memory
        self.num_traced += 1
        steps = []
        for phase, rows in blocks.items():
            step = self._step(state, last, rows, phase)
            assert step.lengths is not None
            steps.append(dataclasses.replace(step, logits_at=jnp.maximum(step.lengths - 1, 0)[:, None]))
        logits, state = self.decoder(params, state, steps)
        found = jnp.concatenate([of_step[:, 0] for of_step in logits]) if len(logits) > 1 else logits[0][:, 0]
        return self._sharded(found if at is None else found[at]), state

    def _trace_model_of_drafts(
        self, params: Tree, state: Tree, buffer: jax.Array, last: jax.Array, rows: Batch
    ) -> tuple[jax.Array, Tree]:
        del buffer  # as in `_trace_model`
        self.num_traced += 1
        logits, state = self.decoder(params, state, self._step(state, last, rows, "decode"))
        return self._sharded(logits), state

    def _trace_scorer(
        self, params: Tree, state: Tree, last: jax.Array, rows: Batch, targets: jax.Array
    ) -> tuple[jax.Array, LogProbs, Tree]:
        self.num_traced += 1
        step = self._step(state, last, rows, "prefill")
        assert step.lengths is not None
        logits, state = self.decoder(params, state, step)
        real = jnp.arange(logits.shape[-1]) < self.vocab_size
        all_logits = jnp.where(real, logits[0], -jnp.inf)
        valid = jnp.isfinite(logits[0].max(axis=-1))
        found = log_probabilities(all_logits, jnp.asarray(targets)[0], valid, min(USUAL_LOGPROBS, self.vocab_size))
        return logits[:, jnp.maximum(step.lengths[0] - 1, 0)], found, state

    def _trace_embedder(self, params: Tree, state: Tree, last: jax.Array, rows: Batch) -> tuple[jax.Array, Tree]:
        self.num_traced += 1
        step = self._step(state, last, rows, "prefill")
        assert step.lengths is not None
        hidden, state = self.decoder.for_hidden_states()(params, state, step)
        return chunk_states(hidden[0], step.lengths[0]), state

    def _step(self, state: Tree, last: jax.Array, rows: Batch, phase: Phase) -> Step:
        all_slots = phase == "decode" and self.decoder.paging is None  # see `ModelCall.decode`
        start, lengths, slots, continues, adapters = jnp.moveaxis(jnp.asarray(rows.scalars), 1, 0)
        if all_slots:  # a slot without new tokens keeps its row
            start = jnp.where(lengths > 0, start, state["lengths"])
        sampled = last.at[slots].get(mode="fill", fill_value=0)
        ids = jnp.where((continues == 1)[:, None] & (jnp.arange(rows.width) == 0), sampled[:, None], rows.ids)
        step = Step(
            ids=ids,
            start=start,
            lengths=lengths,
            slots=None if all_slots else slots,
            pages=None if self.decoder.paging is None else jnp.asarray(rows.pages),
            adapters=None if self._adapters is None else adapters,
            phase=phase,
        )
        # Copies of the numbers, which all layers read, have the same addresses in each call; see `_logits_buffer`.
        return jax.lax.optimization_barrier(step)

    def _trace_sampler(
        self, logits: jax.Array, last: jax.Array, counts: Counts, slots: jax.Array, rows: SamplingRows
    ) -> tuple[Sampled, jax.Array, Counts]:
        self.num_traced += 1
        found = sample(logits, rows, counts)
        if rows.method == "full":
            counts = counts.plus(slots, found.tokens)
        return found, last.at[slots].set(found.tokens, mode="drop"), counts

    def _trace_verifier(
        self,
        logits: jax.Array,
        last: jax.Array,
        counts: Counts,
        drafts: jax.Array,
        slots: jax.Array,
        rows: SamplingRows,
    ) -> tuple[Verified, jax.Array, Counts]:
        self.num_traced += 1
        found = verify(logits, jnp.asarray(drafts), rows, counts)
        width, num_tokens = logits.shape[1], found.num_tokens
        tokens = found.sampled.tokens.reshape(-1, width)
        if rows.method == "full":
            kept = jnp.where(jnp.arange(width) < num_tokens[:, None], tokens, -1)
            counts = counts.plus(jnp.repeat(slots, width), kept.reshape(-1))
        newest = jnp.take_along_axis(tokens, jnp.maximum(num_tokens - 1, 0)[:, None], axis=1)[:, 0]
        return found, last.at[slots].set(newest, mode="drop"), counts

    def _trace_counter(self, counts: Counts, ids: jax.Array, ints: jax.Array) -> Counts:
        self.num_traced += 1
        slots, prompt_lengths, lengths = jnp.moveaxis(ints, 1, 0)
        return counts.restarted(slots, ids, prompt_lengths=prompt_lengths, lengths=lengths)

    def _trace_adapter_writer(self, state: Tree, arrays: Tree, slot: jax.Array) -> Tree:
        self.num_traced += 1
        assert self._adapters is not None
        return state | {"model": self._adapters.write(state["model"], arrays, slot)}
