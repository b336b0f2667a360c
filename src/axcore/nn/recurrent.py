"""The base of layers with a recurrence over the tokens of a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from axcore.config import ConfigError
from axcore.module import DecodingState
from axcore.nn.documents import Documents
from axcore.nn.stateful import StatefulLayer, StateRows
from axcore.nn.tokens import TokenInfo

Carry = Mapping[str, Shaped[Array, "rows ..."]]
"""The carried arrays of some rows, by name."""


class Recurrent(StatefulLayer):
    """Base of layers with a recurrence over the tokens of a row, such as state space models.

    A subclass declares what it carries from token to token in its constructor, writes the recurrence in `advance`, and
    calls `recur`. In training, and at the start of a row, the carried arrays are zero.

    ```python
    class RunningMax(Recurrent):
        class Config(Recurrent.Config):
            input_dim: ax.PositiveInt = ax.REQUIRED

        def __init__(self, cfg, *, rngs):
            self.carry("highest", (cfg.input_dim,), axes=("embed",))

        def __call__(self, x, tokens):
            return self.recur(tokens, x)

        def advance(self, before, documents, x): ...  # see docs/plugins/recurrent.md
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
            self._count_tokens()
        self.carried = (*self.carried, (name, shape, np.dtype(dtype)))
        setattr(self, name, nnx.data(None))
        size, kept = self.config.batch_size, 1 + self.config.max_rollback
        if size is not None:
            axes = (None,) * len(shape) if axes is None else axes
            setattr(self, name, DecodingState(jnp.zeros((size, kept, *shape), dtype), axes=("batch", None, *axes)))

    def advance(
        self, before: Carry, documents: Documents, *inputs: Shaped[Array, "rows width ..."]
    ) -> tuple[Float[Array, "rows width ..."], Carry]:
        """Computes the next tokens of some rows. To be overridden.

        Args:
            before: the carried arrays before the first token, [rows, *shape] for each name.
            documents: which document each token belongs to, and which tokens are padding. `before` belongs to document
                0, and the others start from zeros. Padding must not change what is carried. While decoding, each row
                is one document.
            inputs: the arrays given to `recur`, for these tokens.

        Returns:
            The outputs, and the carried arrays after the last token, as in `before`.
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
            ConfigError: the number of rows is wrong, the rows are packed while decoding, the constructor declared no
                array, or `advance` returned something other than documented.
        """
        if not self.carried:
            raise ConfigError(
                f"{self.frame.path}: {type(self).__name__} carries no array. Call self.carry(name, shape) in its "
                f"constructor for each array of its state"
            )
        parts = list(zip(tokens.blocks, *map(tokens.split, inputs), strict=True))
        return tokens.join(self.frame.map(lambda part: self._block(*part), parts))

    def _block(self, tokens: TokenInfo, *inputs: jax.Array) -> jax.Array:
        batch, documents = inputs[0].shape[0], Documents.of(tokens, inputs[0].shape[0])
        if self.num_tokens is None:
            return self._advanced(
                {name: jnp.zeros((batch, *shape), dtype) for name, shape, dtype in self.carried}, documents, *inputs
            )[0]
        rows, size = self._continue(tokens, batch), 1 + self.config.max_rollback
        valid = rows.is_valid[:, None] if documents.valid is None else documents.valid & rows.is_valid[:, None]
        documents = dataclasses.replace(documents, valid=jnp.broadcast_to(valid, inputs[0].shape[:2]))
        before = {name: self._read(name, rows) for name, *_ in self.carried}
        if size == 1:
            y, after = self._advanced(before, documents, *inputs)
            for name, value in after.items():
                tokens.rows.put(getattr(self, name), value[:, None])
        else:
            y, kept, numbers = self._one_by_one(rows, before, documents, *inputs)
            place = jnp.where(numbers < 0, size, numbers % size)  # `size` is out of range
            for name, value in kept.items():
                rows.write_places(getattr(self, name), place, value)
        return jnp.where(rows.is_valid.reshape(-1, *(1,) * (y.ndim - 1)), y, jnp.nan)

    def _advanced(self, before: Carry, documents: Documents, *inputs: jax.Array) -> tuple[jax.Array, Carry]:
        """`advance`, with a check of what it returns."""
        given, where = self.advance(before, documents, *inputs), f"{self.frame.path}: {type(self).__name__}.advance"
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)):
            raise ConfigError(f"{where} returned {type(given).__name__}. Return (outputs, carried arrays by name)")
        y, after = given
        if y.shape[:2] != inputs[0].shape[:2]:
            raise ConfigError(
                f"{where} returned outputs {y.shape} for inputs {inputs[0].shape}. Return one for each token"
            )
        found, expected = ({name: value.shape for name, value in each.items()} for each in (after, before))
        if found != expected:
            raise ConfigError(
                f"{where} returned the carried arrays {found}, expected {expected}. Return each array that the "
                f"constructor declares, after the last token"
            )
        return y, after

    def _read(self, name: str, rows: StateRows) -> jax.Array:
        """A carried array before the tokens of each row."""
        state, size = getattr(self, name), 1 + self.config.max_rollback
        found = rows.read(state)[:, 0] if size == 1 else rows.read_place(state, rows.start % size)
        return jnp.where((rows.start > 0).reshape(-1, *(1,) * (found.ndim - 1)), found, 0)

    def _one_by_one(
        self, rows: StateRows, before: Carry, documents: Documents, *inputs: jax.Array
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
            out, carry = self._advanced(carry, part[0], *part[1])
            return out, carry

        outputs, kept = zip(*self.frame.map(advanced, parts), strict=True)
        y = jnp.concatenate(outputs[-place.shape[1] :], axis=1)
        if len(outputs) > place.shape[1]:
            at_tail = jnp.arange(batch)[:, None], jnp.where(valid, place, width)
            y = outputs[0].at[at_tail].set(y, mode="drop")
        arrays = {name: jnp.stack([each[name] for each in kept], axis=1) for name in before}
        return y, arrays, jnp.stack(numbers, axis=1)
