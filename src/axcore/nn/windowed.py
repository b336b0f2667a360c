"""The base of layers whose output depends on the last few inputs of a row."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from axcore.config import ConfigError, PositiveInt
from axcore.module import DecodingState
from axcore.nn.documents import Documents
from axcore.nn.kv.cache import KVCache
from axcore.nn.kv.paging import Paging
from axcore.nn.stateful import StatefulLayer
from axcore.nn.tokens import TokenInfo


@dataclasses.dataclass(frozen=True)
class LaggedInputs:
    """The inputs of a `Windowed` layer at each token and before it.

    Attributes:
        tokens: the tokens of the call.
        max_lag: the largest number of tokens between a token and an input.
        rows: for each block, the `max_lag` inputs before the call and those of the call. Inputs before the first token
            of a row may be those of another row.
        documents: the documents of each block.
        is_valid: for each block, false for rows that do not continue their state; None: all rows are valid.
    """

    tokens: TokenInfo
    max_lag: int
    rows: tuple[Float[Array, "rows max_lag_and_width features"], ...]
    documents: tuple[Documents, ...]
    is_valid: tuple[Bool[Array, " rows"] | None, ...]

    def __getitem__(self, lag: int) -> Float[Array, "batch seq features"]:
        """The input `lag` tokens before each token, zero where its document has none.

        Raises:
            IndexError: `lag` is negative or above `max_lag`.
        """
        if not 0 <= lag <= self.max_lag:
            raise IndexError(f"lag={lag} must be from 0 to max_lag={self.max_lag}. Call remember with a larger max_lag")
        found = []
        parts = zip(self.tokens.blocks, self.rows, self.documents, self.is_valid, strict=True)
        for tokens, row, documents, is_valid in parts:
            start, width = self.max_lag - lag, row.shape[1] - self.max_lag
            x = documents.where_same(lag, row[:, start : start + width])
            # Masks after the slice: XLA vectorizes what follows only then.
            if tokens.cached is not None:
                exists, other = tokens.index >= lag, jnp.zeros((1, 1), x.dtype)
                if is_valid is not None:
                    exists, other = exists & is_valid[:, None], jnp.where(is_valid, 0, jnp.nan).astype(x.dtype)[:, None]
                x = jnp.where(exists[..., None], x, other[..., None])
            found.append(x)
        return self.tokens.join(found)


class Windowed(StatefulLayer):
    """Base of layers whose output depends on the last few inputs of a row, such as short convolutions.

    A subclass calls `remember` in its constructor, and reads the inputs before each token from `lagged`:

    ```python
    class Difference(Windowed):  # y_t = x_t - x_{t-1}
        class Config(Windowed.Config):
            input_dim: ax.PositiveInt = ax.REQUIRED

        def __init__(self, cfg, *, rngs):
            self.remember(1, cfg.input_dim)

        def __call__(self, x, tokens):
            inputs = self.lagged(x, tokens)
            return inputs[0] - inputs[1]
    ```

    While decoding, each row keeps its last inputs, the newest last. If the KV caches have pages, all inputs are kept in
    pages like keys, so that rows can share prefixes and replace any tokens.
    """

    class Config(StatefulLayer.Config):
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
    max_lag: int
    past: DecodingState | None

    def remember(self, max_lag: int, features: int, *, axis: str | None = None) -> None:
        """Declares how many inputs before a token its output depends on. While decoding, they are the attribute `past`.

        Args:
            max_lag: the number of inputs before the token.
            features: the features of an input.
            axis: the logical axis of the features.
        """
        cfg = self.config
        self.max_lag, self.past, self.num_tokens = max_lag, nnx.data(None), nnx.data(None)
        if cfg.pages is not None:
            shape, rows = (*cfg.pages, features), "page"
        elif cfg.batch_size is not None:
            self._count_tokens()
            shape, rows = (cfg.batch_size, max_lag + cfg.max_rollback, features), "batch"
        else:
            return
        self.past = DecodingState(jnp.zeros(shape, self.dtypes.compute), axes=(rows, None, axis))

    def lagged(self, x: Float[Array, "batch seq features"], tokens: TokenInfo) -> LaggedInputs:
        """The inputs before each token: `lagged(x, tokens)[lag]`, for lags from 0 to `max_lag`. Keeps the last inputs.

        In a row that does not continue its state, they are NaN.

        Raises:
            ContextError: a layer with decoding state was called without a `Decoder`.
            ConfigError: the number of rows is wrong, or the rows are packed while decoding.
        """
        parts = list(zip(tokens.blocks, tokens.split(x), strict=True))
        documents = tuple(Documents.of(block, part.shape[0]) for block, part in parts)
        found = [self._row(block, each.only_tokens(x)) for (block, x), each in zip(parts, documents, strict=True)]
        rows, is_valid = zip(*found, strict=True)
        return LaggedInputs(tokens, self.max_lag, rows, documents, is_valid)

    def _row(self, tokens: TokenInfo, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The inputs before the tokens of a block and these, and which rows are valid."""
        batch, width, features = x.shape
        if self.past is None:
            return jnp.concatenate([jnp.zeros((batch, self.max_lag, features), x.dtype), x], axis=1), None
        if self.config.paging is not None:
            return jnp.concatenate([self._from_pages(self.past, self.config.paging, tokens, x), x], axis=1), None
        rows = self._continue(tokens, batch)
        past = rows.read(self.past).astype(x.dtype)
        if rows.num_replaced is not None:
            held = jnp.clip(jnp.arange(past.shape[1]) - rows.num_replaced[:, None], 0, past.shape[1] - 1)
            past = jnp.take_along_axis(past, held[..., None], axis=1)
        every, size = jnp.concatenate([past, x], axis=1), past.shape[1]
        last = every[:, 1:]
        if width != 1:
            is_token = jnp.ones((batch, width), bool) if tokens.valid is None else tokens.valid
            end = jnp.where(is_token, jnp.arange(1, width + 1), 0).max(axis=1, keepdims=True)
            last = jnp.take_along_axis(every, (end + jnp.arange(size))[..., None], axis=1)
        rows.write(self.past, last)
        return every[:, self.config.max_rollback :], rows.is_valid

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
        before = start - self.max_lag + jnp.arange(self.max_lag)
        found: jax.Array = past.whole[(*past.layer, *places(before))].astype(x.dtype)
        return found
