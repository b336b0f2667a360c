"""The base of layers that keep state between decoding calls."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int, Shaped

from axcore.config import ConfigError, NonNegativeInt, PositiveInt
from axcore.module import DecodingState, Layer
from axcore.nn.kv.cache import KVCache
from axcore.nn.tokens import TokenInfo


class StateRows(NamedTuple):
    """The rows of a block in the state of a layer.

    Attributes:
        slots: the slot of each row; None: row i of the call is in slot i, for all slots.
        is_written: false for rows that are not written: those without tokens, and those that do not continue their
            state.
        start, stop: the number of tokens of each row before and after the call.
        is_valid: false for rows that neither start again nor continue their state.
        num_replaced: the number of last tokens before the call that it replaces; None: none in any row.
    """

    slots: Int[Array, " rows"] | None
    is_written: Bool[Array, " rows"]
    start: Int[Array, " rows"]
    stop: Int[Array, " rows"]
    is_valid: Bool[Array, " rows"]
    num_replaced: Int[Array, " rows"] | None

    def read(self, state: DecodingState) -> Shaped[Array, "rows ..."]:
        """The rows of an array [slots, ...]."""
        held: jax.Array = state[...]
        return held if self.slots is None else held[self.slots]

    def write(self, state: DecodingState, values: Shaped[Array, "rows ..."]) -> None:
        """Writes rows of an array [slots, ...]."""
        if self.slots is None:  # without a scatter, XLA updates all slots in one loop
            held = state[...]
            chosen = self.is_written.reshape(-1, *(1,) * (held.ndim - 1))
            state[...] = jnp.where(chosen, values.astype(held.dtype), held)
        else:
            state.put((self._written(state),), values)

    def read_place(self, state: DecodingState, place: Int[Array, " rows"]) -> Shaped[Array, "rows ..."]:
        """A place of each row of an array [slots, places, ...]."""
        held = state[...]
        slots = jnp.arange(held.shape[0]) if self.slots is None else self.slots
        found: jax.Array = held[slots, place]
        return found

    def write_places(
        self, state: DecodingState, place: Int[Array, "rows places"], values: Shaped[Array, "rows places ..."]
    ) -> None:
        """Writes places of each row of an array [slots, places, ...]. Those out of range are dropped."""
        state.put((self._written(state)[:, None], place), values)

    def _written(self, state: DecodingState) -> Int[Array, " rows"]:
        """The slot of each row that is written, and a number out of range for the others."""
        size = state.whole.shape[len(state.layer)]
        return jnp.where(self.is_written, jnp.arange(size) if self.slots is None else self.slots, size)


class StatefulLayer(Layer):
    """Base of layers that keep state between decoding calls: `Recurrent` and `Windowed`.

    A call that neither starts a row again nor continues its state is not valid, because it leaves tokens out or
    replaces more than `max_rollback` of them. It gives NaN for the row, whose state does not change.
    """

    class Config(Layer.Config):
        batch_size: PositiveInt | None = None
        """Number of rows that are decoded together. Their state is kept for the next call. None: no state."""
        max_rollback: NonNegativeInt = 0
        """The largest number of last tokens of a row that the next call may replace, while decoding."""

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> StatefulLayer.Config:
            """Adds the state of `batch_size` rows."""
            return self.set(batch_size=batch_size)

    config: Config
    num_tokens: DecodingState | None
    earliest: DecodingState | None

    def _count_tokens(self) -> None:
        """Creates `num_tokens`, int32 [slots], the number of tokens of each row, and with `max_rollback` also
        `earliest`, the smallest number of tokens from which the row can be continued."""
        self.num_tokens = self.earliest = nnx.data(None)
        if self.config.batch_size is not None:
            none = jnp.zeros((self.config.batch_size,), jnp.int32)
            self.num_tokens = DecodingState(none, axes=("batch",))
            if self.config.max_rollback:
                self.earliest = DecodingState(none, axes=("batch",))

    def _continue(self, tokens: TokenInfo, batch: int) -> StateRows:
        """The rows that a block of `batch` rows continues. Updates `num_tokens` and `earliest`.

        Raises:
            ConfigError: the number of rows is wrong, or the rows are packed.
        """
        cfg, cached = self.config, tokens.rows
        assert self.num_tokens is not None and cfg.batch_size is not None
        if cached.slots is None and batch != cfg.batch_size:
            raise ConfigError(
                f"{self.frame.path}: {type(self).__name__} keeps the state of batch_size={cfg.batch_size} rows but was "
                f"called with {batch}. Pass {cfg.batch_size} rows, or the slot of each row"
            )
        if tokens.segment_ids is not None:
            raise ConfigError(
                f"{self.frame.path}: {type(self).__name__} was given segment_ids while decoding, but a row that is "
                f"continued is one document. Leave them out"
            )
        index = jnp.broadcast_to(tokens.index, (batch, tokens.index.shape[1]))
        exists = True if tokens.valid is None else tokens.valid
        start = jnp.where(exists, index, jnp.iinfo(jnp.int32).max).min(axis=1)
        stop = jnp.where(exists, index, -1).max(axis=1) + 1
        before = cached.take(self.num_tokens)
        earliest = before if self.earliest is None else cached.take(self.earliest)
        is_valid = (stop == 0) | (start == 0) | ((earliest <= start) & (start <= before))
        num_replaced = None if self.earliest is None else before - start
        rows = StateRows(cached.slots, is_valid & (stop > 0), start, stop, is_valid, num_replaced)
        rows.write(self.num_tokens, stop)
        if self.earliest is not None:
            rows.write(self.earliest, jnp.maximum(jnp.where(start == 0, 0, earliest), stop - cfg.max_rollback))
        return rows
