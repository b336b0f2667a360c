"""A prompt that one engine has computed and another continues: its decoding state and its first token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from axcore.config import AxcoreError, ConfigError
from axcore.infer.execution.row_state import RowState
from axcore.infer.loaded_adapters import LoadedAdapter
from axcore.infer.requests import Piece, Request, TokenLogprob


@dataclasses.dataclass(frozen=True)
class Handover:
    """What a decoding engine needs to continue a prompt.

    Attributes:
        model: identifies the model and its weights; see `ModelIdentity`.
        adapter: identifies the weights of the adapter of the request; see `Adapters.identity`. None: no adapter.
        ids: the prompt and the first token of the output.
        state: the decoding state of the prompt, on a device or on the host.
        logprob: the log-probability of the first token, if the request asks for it.
        prompt_logprobs: those of the prompt, if the request asks for them.
        num_cached: the number of tokens of the prompt that its engine found in the cache.
    """

    model: str
    adapter: str | None
    ids: tuple[int, ...]
    state: RowState
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    num_cached: int = 0

    def check(self, request: Request, model: str, vocab_size: int) -> None:
        """Checks that the handover belongs to a request and a model.

        Args:
            request: the request that was exported.
            model: identifies the model of this engine.
            vocab_size: the number of its token ids.

        Raises:
            ConfigError: it does not.
        """
        if self.model != model:
            raise ConfigError(
                f"handover: it comes from the model {self.model}, but this engine has {model}. Load the same config "
                f"and weights in both engines"
            )
        if self.ids[:-1] != request.ids or self.state.num_tokens != len(request.ids):
            raise ConfigError(
                f"handover: it has {self.state.num_tokens} computed and {len(self.ids)} known tokens, which are not "
                f"the {len(request.ids)} of the prompt and the first of the output. Resume the exported request"
            )
        if not 0 <= self.ids[-1] < vocab_size:
            raise ConfigError(
                f"handover: token id {self.ids[-1]} is not below {vocab_size}, the size of the vocabulary. Load the "
                f"same model in both engines"
            )

    def check_adapter(self, loaded: LoadedAdapter | None) -> None:
        """Checks that the prompt was computed with the adapter that continues it.

        Raises:
            ConfigError: it was not.
        """
        if loaded is not None and loaded.identity != self.adapter:
            raise ConfigError(
                f"handover: request.adapter={loaded.name!r} has the weights {self.adapter} in the engine that computed "
                f"the prompt, but {loaded.identity} in this engine. Load the same adapter in both"
            )


Export = Callable[[Piece, RowState, str | None], None]
"""Receives the first token of a sample, the state of its prompt, and the identity of its adapter."""

DeliverHandover = Callable[[Handover | Piece | AxcoreError], None]
"""Receives the handover of a request; an empty `Piece` if it was cancelled; or the error that ends it. It runs in the
thread of the sender, so it must return soon."""


class Prefill(Protocol):
    """Computes prompts for other engines: an `Engine` of this process, a `RemotePrefill`, or another transport."""

    def export(self, request: Request, deliver: DeliverHandover, *, sample: int = 0) -> Callable[[], None]:
        """Starts to compute a prompt. Returns a function that cancels it. See `Engine.export`."""
