"""Occurrences of tokens in the rows of an engine, for penalties."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """The tokens of each slot, on the device. Donate it to the functions that return a new one.

    Attributes:
        prompt: whether the prompt contains a token.
        output: how often the output contains a token.
    """

    prompt: Bool[Array, "slots vocab"]
    output: Int32[Array, "slots vocab"]

    @classmethod
    def zeros(cls, num_slots: int, vocab_size: int) -> Counts:
        """Empty slots."""
        shape = num_slots, vocab_size
        return cls(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32))

    def restarted(
        self,
        slots: Int[Array, " rows"],
        ids: Int[Array, "rows width"],
        *,
        prompt_lengths: Int[Array, " rows"],
        lengths: Int[Array, " rows"],
    ) -> Counts:
        """Replaces the contents of some slots, when their rows are admitted.

        Args:
            slots: the slots, without duplicates. Those out of range are ignored.
            ids: all tokens of each row, padded at the end.
            prompt_lengths: the number of tokens of each prompt. Later tokens are output, such as those of a row that
                was preempted.
            lengths: the number of tokens without padding.
        """
        num_slots, vocab_size = self.output.shape
        slots = jnp.where(slots < 0, num_slots, slots)  # JAX counts negative indices from the end
        at = jnp.arange(ids.shape[1])
        in_prompt = at < prompt_lengths[:, None]
        real = (at < lengths[:, None]) & (ids >= 0)
        rows = slots[:, None]
        return Counts(
            self.prompt.at[slots]
            .set(False, mode="drop")
            .at[rows, jnp.where(real & in_prompt, ids, vocab_size)]
            .set(True, mode="drop"),
            self.output.at[slots]
            .set(0, mode="drop")
            .at[rows, jnp.where(real & ~in_prompt, ids, vocab_size)]
            .add(1, mode="drop"),
        )

    def plus(self, slots: Int[Array, " rows"], tokens: Int[Array, " rows"]) -> Counts:
        """Adds one output token to each slot. Slots out of range and negative tokens are ignored."""
        num_slots = self.output.shape[0]
        slots = jnp.where((slots < 0) | (tokens < 0), num_slots, slots)
        return Counts(self.prompt, self.output.at[slots, tokens].add(1, mode="drop"))
