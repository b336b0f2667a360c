"""What proposes drafts: the contract of every drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from axcore import config
from axcore.config import PositiveInt
from axcore.infer.decoding.decoder import Decoder
from axcore.infer.sampling import Method
from axcore.infer.sequences import Sequence
from axcore.module import Layer, Tree

type Drafts = dict[int, tuple[int, ...]]
"""Tokens that may follow the last token of a sequence, by the id of the sequence."""


@dataclasses.dataclass(frozen=True)
class Target:
    """The model whose tokens a drafter predicts.

    Attributes:
        model: the model in the form for training.
        decoder: the model with its decoding state. Drafts are for sequences in its slots.
        state: returns the decoding state after the last step.
        vocab_size: the number of token ids.
        draft_model: the argument `draft_model` of the engine.
    """

    model: Layer
    decoder: Decoder
    state: Callable[[], Tree]
    vocab_size: int
    draft_model: Layer | None = None


class Drafter(config.Configurable):
    """Proposes drafts for the sequences of an engine, which calls it in its thread before each step.

    Drafts only change the speed: the engine accepts them as long as they are the tokens that the model samples.

    Args:
        target: the model whose tokens it predicts.

    Attributes:
        num_traced: the number of programs that were compiled.
    """

    class Config(config.Config):
        num_speculative_tokens: PositiveInt = 4
        """The largest number of drafts of a sequence in a step. A step computes all of them, accepted or not."""

        @property
        def reads_hidden_states(self) -> bool:
            """Whether the decoding state of the model must keep hidden states; see `keeping_hidden_states`."""
            return False

    config: Config
    num_traced = 0

    def __init__(self, cfg: Config, target: Target):
        self.config = cfg

    def propose(self, sequences: Iterable[Sequence], seeds: Mapping[int, tuple[int, int]]) -> Drafts:
        """Drafts for sequences whose tokens are known and, all but the last, computed.

        Args:
            sequences: the sequences. They have slots, and may have had others before.
            seeds: the words of the seed of each sequence, by id; see `seed_words`.

        Returns:
            At most `num_speculative_tokens` token ids of the vocabulary for each sequence, by id; none for sequences
            that are missing.
        """
        raise NotImplementedError

    def warm_up(self, methods: Iterable[Method]) -> None:
        """Compiles programs that later calls need.

        Args:
            methods: the sampling methods of later requests.
        """

    def close(self) -> None:
        """Frees the memory of the device."""
