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
    """

    slots: Int[Array, " rows"] | None
    is_written: Bool[Array, " rows"]
    start: Int[Array, " rows"]
    stop: Int[Array, " rows"]
    is_valid: Bool[Array, " rows"]

    def read(self, state: DecodingState, place: Int[Array, "rows places"]) -> Shaped[Array, "rows places ..."]:
        """Places of each row of an array [slots, places, ...]."""
        held = state[...]
        if held.shape[1] == place.shape[1] == 1:
            return held if self.slots is None else held[self.slots]
        if self.slots is not None:
            found: jax.Array = held[self.slots[:, None], place]
            return found
        return jnp.take_along_axis(held, place.reshape(*place.shape, *(1,) * (held.ndim - 2)), axis=1)

    def write(
        self, state: DecodingState, place: Int[Array, "rows places"], values: Shaped[Array, "rows places ..."]
    ) -> None:
        """Writes places of each row. Those out of range are dropped."""
        size = state.whole.shape[len(state.layer)]
        slots = jnp.arange(size, dtype=jnp.int32) if self.slots is None else self.slots
        if self.slots is not None or place.shape[1] > 1:
            state.put((jnp.where(self.is_written, slots, size)[:, None], place), values)
            return
        held = state[...]  # without a scatter, XLA updates all slots in one loop
        chosen = (jnp.arange(held.shape[1]) == place) & self.is_written[:, None]
        chosen = chosen.reshape(*chosen.shape, *(1,) * (held.ndim - 2))
        state[...] = jnp.where(chosen, values.astype(held.dtype), held)


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
    resumable: DecodingState | None

    def _make_resumable(self) -> None:
        """Creates `resumable`, int32 [slots, 1, 2]: the smallest and the largest number of tokens after which each row
        can be continued."""
        self.resumable = nnx.data(None)
        if self.config.batch_size is not None:
            self.resumable = DecodingState(
                jnp.zeros((self.config.batch_size, 1, 2), jnp.int32), axes=("batch", None, None)
            )

    def _continue(self, tokens: TokenInfo, batch: int) -> StateRows:
        """The rows that a block of `batch` rows continues. Updates `resumable`.

        Raises:
            ConfigError: the number of rows is wrong, or the rows are packed.
        """
        cfg, cached = self.config, tokens.rows
        assert self.resumable is not None and cfg.batch_size is not None
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
        held = self.resumable[...] if cached.slots is None else self.resumable[...][cached.slots]
        least, most = jnp.moveaxis(held[:, 0], -1, 0)
        is_valid = (stop == 0) | (start == 0) | ((least <= start) & (start <= most))
        rows = StateRows(cached.slots, is_valid & (stop > 0), start, stop, is_valid)
        least = jnp.maximum(jnp.where(start == 0, 0, least), stop - cfg.max_rollback)
        rows.write(self.resumable, jnp.zeros((batch, 1), jnp.int32), jnp.stack([least, stop], axis=1)[:, None])
        return rows
