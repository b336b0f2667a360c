"""Bases of layers that continue rows from a state: recurrences, and functions of the last few tokens.

A subclass computes over rows of one width. What a decoder does with rows is here: several blocks of rows in one call,
the slots of rows, padding, rows that start again, and rows whose last tokens are replaced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from axcore.config import ConfigError, NonNegativeInt, PositiveInt
from axcore.module import DecodingState, Layer
from axcore.nn.documents import Documents
from axcore.nn.kv.cache import KVCache
from axcore.nn.kv.paging import Paging
from axcore.nn.tokens import TokenInfo

Carry = Mapping[str, Shaped[Array, "rows ..."]]
"""The carried arrays of some rows, by name."""


class _Rows(NamedTuple):
    """The rows of a block in the state of a layer.

    Attributes:
        slots: the slot of each row; None: row i of the call is in slot i, for all slots.
        is_written: false for rows that are not written: those without tokens, and those that do not continue their
            state.
        start, stop: the number of tokens of each row before and after the call.
        goes_on: whether each row starts again or continues its state.
    """

    slots: Int[Array, " rows"] | None
    is_written: Bool[Array, " rows"]
    start: Int[Array, " rows"]
    stop: Int[Array, " rows"]
    goes_on: Bool[Array, " rows"]

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


class ContinuedLayer(Layer):
    """Base of `Recurrent` and `Windowed`.

    A row whose call does not continue its state, because it leaves tokens out or replaces more than `max_rollback` of
    them, gets NaN and keeps its state.
    """

    class Config(Layer.Config):
        batch_size: PositiveInt | None = None
        """Number of rows that are decoded together. Their state is kept for the next call. None: no state."""
        max_rollback: NonNegativeInt = 0
        """The largest number of last tokens of a row that the next call may replace, while decoding."""

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> ContinuedLayer.Config:
            """Adds the state of `batch_size` rows."""
            return self.set(batch_size=batch_size)

    config: Config
    span: DecodingState | None

    def _make_span(self) -> None:
        """Creates the state that tells after how many tokens each row can be continued: [slots, 1, least and most]."""
        self.span = nnx.data(None)
        if self.config.batch_size is not None:
            self.span = DecodingState(jnp.zeros((self.config.batch_size, 1, 2), jnp.int32), axes=("batch", None, None))

    def _continue(self, tokens: TokenInfo, batch: int) -> _Rows:
        """The rows that a block continues. Updates `span`."""
        cfg, cached = self.config, tokens.rows
        assert self.span is not None and cfg.batch_size is not None
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
        held = self.span[...] if cached.slots is None else self.span[...][cached.slots]
        least, most = jnp.moveaxis(held[:, 0], -1, 0)
        goes_on = (stop == 0) | (start == 0) | ((least <= start) & (start <= most))
        rows = _Rows(cached.slots, goes_on & (stop > 0), start, stop, goes_on)
        least = jnp.maximum(jnp.where(start == 0, 0, least), stop - cfg.max_rollback)
        rows.write(self.span, jnp.zeros((batch, 1), jnp.int32), jnp.stack([least, stop], axis=1)[:, None])
        return rows


class Recurrent(ContinuedLayer):
    """Base of layers with a recurrence over the tokens of a row, such as state space models.

    A subclass declares what it carries from token to token in its constructor, writes the recurrence in `advance`, and
    calls `recur`. In training, and at the start of a row, the carried arrays are zero.

    ```python
    class Average(Recurrent):  # y_t = decay y_{t-1} + x_t
        class Config(Recurrent.Config):
            input_dim: ax.PositiveInt = ax.REQUIRED
            decay: ax.Fraction = 0.9

        def __init__(self, cfg, *, rngs):
            self.carry("last", (cfg.input_dim,), axes=("embed",))

        def __call__(self, x, tokens):
            return self.recur(tokens, x)

        def advance(self, before, documents, x):
            def step(last, now):
                x, is_token = now
                last = jnp.where(is_token[:, None], self.config.decay * last + x, last)
                return last, last

            valid = jnp.ones(x.shape[:2], bool) if documents.valid is None else documents.valid
            last, y = jax.lax.scan(step, before["last"], (jnp.moveaxis(x, 1, 0), valid.T))
            return jnp.moveaxis(y, 0, 1), {"last": last}
    ```

    While decoding with `max_rollback=k`, the state after each of the last k tokens is kept as well. It is computed by
    calls of `advance` with one token.
    """

    carried: tuple[tuple[str, tuple[int, ...], np.dtype[np.generic]], ...] = ()

    def carry(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: DTypeLike = jnp.float32,
        axes: tuple[str | None, ...] | None = None,
    ) -> None:
        """Declares an array that is carried from token to token. While decoding, it is the attribute `name`.

        Args:
            name: the name of the array.
            shape: its shape for one row.
            dtype: its dtype.
            axes: the logical axes of `shape`; None: none.
        """
        if not self.carried:
            self._make_span()
        self.carried = (*self.carried, (name, shape, np.dtype(dtype)))
        setattr(self, name, nnx.data(None))
        size, kept = self.config.batch_size, 1 + self.config.max_rollback
        if size is not None:
            axes = (None,) * len(shape) if axes is None else axes
            setattr(self, name, DecodingState(jnp.zeros((size, kept, *shape), dtype), axes=("batch", None, *axes)))

    def advance(
        self, before: Carry, documents: Documents, *inputs: Shaped[Array, "rows width ..."]
    ) -> tuple[Float[Array, "rows width ..."], Carry]:
        """Computes the next tokens of some rows.

        Args:
            before: the carried arrays after the token before each row's first one.
            documents: the documents of the tokens, the first of which `before` belongs to, and which are padding.
                Padding must not change what is carried. While decoding, a row is one document.
            inputs: what `recur` was given for these tokens.

        Returns:
            The outputs, and the carried arrays after the last token.
        """
        raise NotImplementedError

    def recur(self, tokens: TokenInfo, *inputs: Shaped[Array, "batch seq ..."]) -> Float[Array, "batch seq ..."]:
        """Runs `advance` for each block of rows, from the state of the rows while decoding, and keeps the new state.

        Args:
            tokens: the tokens.
            inputs: arrays with an entry for each token.

        Returns:
            The outputs. Those of a row that does not continue its state are NaN.

        Raises:
            ContextError: a layer with decoding state was called without a `Decoder`.
            ConfigError: the number of rows is wrong, or the rows are packed while decoding.
        """
        parts = list(zip(tokens.blocks, *map(tokens.split, inputs), strict=True))
        return tokens.join(self.frame.each(lambda part: self._block(*part), parts))

    def _block(self, tokens: TokenInfo, *inputs: jax.Array) -> jax.Array:
        batch, documents = inputs[0].shape[0], Documents.of(tokens, inputs[0].shape[0])
        if self.span is None:
            return self.advance(
                {name: jnp.zeros((batch, *shape), dtype) for name, shape, dtype in self.carried}, documents, *inputs
            )[0]
        rows, size = self._continue(tokens, batch), 1 + self.config.max_rollback
        before = {name: self._read(name, rows) for name, *_ in self.carried}
        if size == 1:
            y, after = self.advance(before, documents, *inputs)
            kept, numbers = {name: value[:, None] for name, value in after.items()}, rows.stop[:, None]
        else:
            y, kept, numbers = self._one_by_one(rows, before, documents, *inputs)
        place = jnp.where(numbers < 0, size, numbers % size)  # `size` is out of range
        for name, value in kept.items():
            rows.write(getattr(self, name), place, value)
        return jnp.where(rows.goes_on.reshape(-1, *(1,) * (y.ndim - 1)), y, jnp.nan)

    def _read(self, name: str, rows: _Rows) -> jax.Array:
        """A carried array before the tokens of each row."""
        found = rows.read(getattr(self, name), rows.start[:, None] % (1 + self.config.max_rollback))[:, 0]
        return jnp.where((rows.start > 0).reshape(-1, *(1,) * (found.ndim - 1)), found, 0)

    def _one_by_one(
        self, rows: _Rows, before: Carry, documents: Documents, *inputs: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
        """Computes the last `max_rollback` tokens of each row one by one, after those before them together.

        Returns:
            The outputs, the carried arrays [rows, kept, ...] after the tokens whose state is kept, and int32 [rows,
            kept], after how many tokens of the row; negative for none.
        """
        (batch, width), most = inputs[0].shape[:2], self.config.max_rollback
        at = jnp.arange(width)
        valid = jnp.ones((batch, width), bool) if documents.valid is None else documents.valid
        parts: list[tuple[Documents, tuple[jax.Array, ...]]] = []
        numbers = []
        if width <= 1 + most:
            place = jnp.broadcast_to(at, (batch, width))
        else:
            end = jnp.where(valid, at + 1, 0).max(axis=1, keepdims=True)
            first = dataclasses.replace(documents, valid=valid & (at < end - most))
            parts.append((first, inputs))
            numbers.append(jnp.where(rows.stop - most > rows.start, rows.stop - most, -1))
            place = end - most + jnp.arange(most)
        inside = (place >= 0) & (place < width)
        clipped = jnp.clip(place, 0, width - 1)
        valid = jnp.take_along_axis(valid, clipped, axis=1) & inside
        count = rows.stop - valid.sum(axis=1)
        for number in range(place.shape[1]):
            one, is_token = clipped[:, number], valid[:, number]
            now = tuple(x[jnp.arange(batch), one][:, None] for x in inputs)
            parts.append((Documents(None, is_token[:, None]), now))
            count += is_token
            numbers.append(jnp.where(is_token, count, -1))
        carry = before

        def advanced(part: tuple[Documents, tuple[jax.Array, ...]]) -> tuple[jax.Array, Carry]:
            nonlocal carry
            out, carry = self.advance(carry, part[0], *part[1])
            return out, carry

        outputs, kept = zip(*self.frame.each(advanced, parts), strict=True)
        y = jnp.concatenate(outputs[-place.shape[1] :], axis=1)
        if len(outputs) > place.shape[1]:
            at_tail = jnp.arange(batch)[:, None], jnp.where(valid, place, width)
            y = outputs[0].at[at_tail].set(y, mode="drop")
        arrays = {name: jnp.stack([each[name] for each in kept], axis=1) for name in before}
        return y, arrays, jnp.stack(numbers, axis=1)


@dataclasses.dataclass(frozen=True)
class Earlier:
    """The inputs of a `Windowed` layer by their distance from each token.

    Attributes:
        tokens: the tokens of the call.
        reach: the largest distance.
        rows: for each block, the `reach` tokens before the call and those of the call, [rows, reach + width, features].
        documents: the documents of each block.
    """

    tokens: TokenInfo
    reach: int
    rows: tuple[Float[Array, "rows reach_and_width features"], ...]
    documents: tuple[Documents, ...]

    def __getitem__(self, lag: int) -> Float[Array, "batch seq features"]:
        """The input `lag` tokens before each token, zero where its document has none."""
        found = []
        for row, documents in zip(self.rows, self.documents, strict=True):
            start, width = self.reach - lag, row.shape[1] - self.reach
            found.append(documents.where_same(lag, row[:, start : start + width]))
        return self.tokens.join(found)


class Windowed(ContinuedLayer):
    """Base of layers whose output depends on the last few inputs of a row, such as short convolutions.

    A subclass calls `remember` in its constructor, and reads the inputs before each token from `earlier`:

    ```python
    class Difference(Windowed):  # y_t = x_t - x_{t-1}
        class Config(Windowed.Config):
            input_dim: ax.PositiveInt = ax.REQUIRED

        def __init__(self, cfg, *, rngs):
            self.remember(1, cfg.input_dim)

        def __call__(self, x, tokens):
            inputs = self.earlier(x, tokens)
            return inputs[0] - inputs[1]
    ```

    While decoding, the input of the token at `index` is kept in the place `index % size` of its row. If the KV caches
    have pages, all inputs are kept in pages like keys, so that rows can share prefixes and replace any tokens.
    """

    class Config(ContinuedLayer.Config):
        pages: tuple[PositiveInt, PositiveInt] | None = None
        """Number and size of the pages that keep all inputs while decoding; None: each row keeps its last ones."""
        shares_pages: ClassVar[bool] = True
        """Whether inputs are kept in pages if the KV caches have pages."""

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> Windowed.Config:
            """Adds the state of `batch_size` rows, or of the pages of the cache."""
            paging = cache.paging if self.shares_pages else None
            pages = self.pages if paging is None else (paging.num_pages, paging.page_size)
            return self.set(batch_size=batch_size, pages=pages)

        @property
        def paging(self) -> Paging | None:
            """The pool of pages, as in `KVCache.Config`."""
            return None if self.pages is None else Paging(num_pages=self.pages[0], page_size=self.pages[1])

    config: Config
    reach: int
    past: DecodingState | None

    def remember(self, reach: int, features: int, *, axis: str | None = None) -> None:
        """Declares how many inputs before a token its output depends on. While decoding, they are the attribute `past`.

        Args:
            reach: the number of inputs before the token.
            features: the features of an input.
            axis: the logical axis of the features.
        """
        cfg = self.config
        self.reach, self.past, self.span = reach, nnx.data(None), nnx.data(None)
        if cfg.pages is not None:
            shape, rows = (*cfg.pages, features), "page"
        elif cfg.batch_size is not None:
            self._make_span()
            shape, rows = (cfg.batch_size, reach + cfg.max_rollback, features), "batch"
        else:
            return
        self.past = DecodingState(jnp.zeros(shape, self.dtypes.compute), axes=(rows, None, axis))

    def earlier(self, x: Float[Array, "batch seq features"], tokens: TokenInfo) -> Earlier:
        """The inputs before each token: `earlier(x, tokens)[lag]`, for lags from 0 to `reach`. Keeps the last inputs.

        In a row that does not continue its state, they are NaN.

        Raises:
            ContextError: a layer with decoding state was called without a `Decoder`.
            ConfigError: the number of rows is wrong, or the rows are packed while decoding.
        """
        parts = list(zip(tokens.blocks, tokens.split(x), strict=True))
        documents = tuple(Documents.of(block, part.shape[0]) for block, part in parts)
        rows = [self._row(block, each.only_tokens(x)) for (block, x), each in zip(parts, documents, strict=True)]
        return Earlier(tokens, self.reach, tuple(rows), documents)

    def _row(self, tokens: TokenInfo, x: jax.Array) -> jax.Array:
        """The inputs before the tokens of a block, and these."""
        batch, width, features = x.shape
        if self.past is None:
            return jnp.concatenate([jnp.zeros((batch, self.reach, features), x.dtype), x], axis=1)
        if self.config.paging is not None:
            return jnp.concatenate([self._from_pages(self.past, self.config.paging, tokens, x), x], axis=1)
        rows, size = self._continue(tokens, batch), self.past[...].shape[1]
        before = rows.start[:, None] - self.reach + jnp.arange(self.reach)
        if size:
            past = rows.read(self.past, before % size)
        else:
            past = jnp.zeros((batch, 0, features), x.dtype)
        past = jnp.where((before >= 0)[..., None], past, 0).astype(x.dtype)
        index = jnp.broadcast_to(tokens.index, (batch, width))
        kept = index >= rows.stop[:, None] - size  # later tokens overwrite the others
        if tokens.valid is not None:
            kept &= tokens.valid
        if size:
            rows.write(self.past, jnp.where(kept, index % size, size), x)
        row = jnp.concatenate([past, x], axis=1)
        return jnp.where(rows.goes_on[:, None, None], row, jnp.nan)

    def _from_pages(self, past: DecodingState, paging: Paging, tokens: TokenInfo, x: jax.Array) -> jax.Array:
        """The inputs before the tokens of a block, after these are written. Parts of a prompt are rows of one block, so
        they see each other's."""
        batch, width, _ = x.shape
        table, size = tokens.rows.pages, paging.page_size
        if table is None:
            raise ConfigError(
                f"{self.frame.path}: pages={self.config.pages} requires page tables. Decode with a paged KV cache, or "
                f"set pages=None"
            )

        def places(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            column = jnp.clip(index // size, 0, table.shape[1] - 1)
            return jnp.take_along_axis(table, column, axis=1), index % size

        index = jnp.broadcast_to(tokens.index, (batch, width))
        exists = jnp.broadcast_to(True if tokens.valid is None else tokens.valid, (batch, width))
        page, place = places(index)
        is_kept = exists & (index >= 0) & (index < table.shape[1] * size)
        past.put((jnp.where(is_kept, page, paging.num_pages), place), x)
        start = jnp.where(exists, index, jnp.iinfo(jnp.int32).max - width).min(axis=1, keepdims=True)
        before = start - self.reach + jnp.arange(self.reach)
        found = past.whole[(*past.layer, *places(before))].astype(x.dtype)
        return jnp.where((before >= 0)[..., None], found, 0)
