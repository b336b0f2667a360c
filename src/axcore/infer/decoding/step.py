"""The new tokens of one call of a decoder."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from axcore.config import ConfigError
from axcore.nn import Phase


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """New tokens for some rows of the decoding state.

    The tokens of a row may be a prompt, a chunk of a prompt, a single token, or several draft tokens to verify. To roll
    back, start the next step at an earlier position: cached tokens from this position on are dropped.

    Attributes:
        ids: the new tokens of each row, padded at the end.
        start: the position of the first new token in its row; 0 restarts the row.
        lengths: the number of new tokens in each row, without padding; None: the width.
        slots: the slot of each row in the state. None: row i uses slot i, and every slot has a row. No slot has two
            rows, unless the decoder `shares_prefixes` and the step has page tables: then consecutive parts of one
            prompt may be rows of one step.
        logits_at: the tokens of each row whose logits are computed, as indices into the width; None: all tokens.
        adapters: the slot of the adapter of each row, -1 for none; None: no row has an adapter (see `Adapters`).
        pages: the pages of each row, in order, for paged caches; `Paging.num_pages` marks an unused entry. None: each
            slot has its own pages, which requires a pool with room for every slot.
        phase: `prefill` or `decode`; None: `decode` if the width is 1, otherwise `prefill`.

    Raises:
        ConfigError: the shapes or dtypes do not match the annotations.
    """

    ids: Int[Array, "batch width"]
    start: Int[Array, " batch"]
    lengths: Int[Array, " batch"] | None = None
    slots: Int[Array, " batch"] | None = None
    logits_at: Int[Array, "batch logits"] | None = None
    pages: Int[Array, "batch pages_per_row"] | None = None
    adapters: Int[Array, " batch"] | None = None
    phase: Phase | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "phase"}
        arrays = {name: array for name, array in given.items() if array is not None}
        if self.phase not in (None, "prefill", "decode"):
            raise ConfigError(f"Step.phase must be 'prefill', 'decode' or None, not {self.phase!r}")
        for name, array in arrays.items():
            if isinstance(array, int | float | list):
                raise ConfigError(f"Step.{name} must be an array, not {array!r}")
        if not all(hasattr(array, "dtype") and hasattr(array, "ndim") for array in arrays.values()):
            return  # JAX unflattens pytrees with leaves other than arrays, such as axes
        batch = self.ids.shape[:1]
        if self.ids.ndim != 2 or 0 in self.ids.shape:
            raise ConfigError(
                f"Step.ids must be [batch, width] with at least one row and one token, got shape {self.ids.shape}"
            )
        for name, array in arrays.items():
            if not jnp.issubdtype(array.dtype, jnp.integer):
                raise ConfigError(f"Step.{name} must have an integer dtype, not {array.dtype}")
            if name in ("start", "lengths", "slots", "adapters") and array.shape != batch:
                raise ConfigError(
                    f"Step.{name} must have shape {batch}, one number for each row; got shape {array.shape}"
                )
            if name in ("logits_at", "pages") and (array.ndim != 2 or array.shape[:1] != batch):
                raise ConfigError(f"Step.{name} must be [batch, ...] with two dimensions, got shape {array.shape}")
