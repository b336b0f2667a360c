"""A prompt that one engine has computed and another continues: its decoding state and its first token."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np

from axcore.config import AxcoreError, ConfigError, flatten
from axcore.infer.requests import Piece, Request, TokenLogprob
from axcore.infer.row_state import RowState
from axcore.infer.streams import Deliver
from axcore.module import Layer, functional
from axcore.train.run.identity import is_layout, layout_fields


@dataclasses.dataclass(frozen=True)
class Handover:
    """What a decoding engine needs to continue a prompt.

    Attributes:
        model: identifies the model and its weights; see `model_identity`.
        ids: the prompt and the first token of the output.
        state: the decoding state of the prompt, on a device or on the host.
        logprob: the log-probability of the first token, if the request asks for it.
        prompt_logprobs: those of the prompt, if the request asks for them.
    """

    model: str
    ids: tuple[int, ...]
    state: RowState
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    def check(self, request: Request, model: str) -> None:
        """Checks that the handover belongs to a request and a model.

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


DeliverHandover = Callable[[Handover | Piece | AxcoreError], None]
"""Receives the handover of a request; an empty `Piece` if it was cancelled; or the error that ends it. It runs in the
thread of the sender, so it must return soon."""


class Prefill(Protocol):
    """Computes prompts for other engines: an `Engine` of this process, a `RemotePrefill`, or another transport."""

    def export(self, request: Request, deliver: DeliverHandover, *, sample: int = 0) -> Callable[[], None]:
        """Starts to compute a prompt. Returns a function that cancels it. See `Engine.export`."""


def model_identity(model: Layer) -> str:
    """Identifies a model: a hash of what its config computes, and of the shape and the first values of each parameter.

    Kernels, caches and meshes do not change it. Models that differ in later values only have the same identity.
    """
    cfg, params = model.config, jax.tree.leaves_with_path(functional(model)[1])
    fields = layout_fields(cfg)
    parts = [type(model).__name__]
    parts += sorted(f"{path}={text}" for path, text in flatten(cfg).items() if not is_layout(path, fields))
    parts += [f"{jax.tree_util.keystr(path)} {leaf.dtype}{leaf.shape}" for path, leaf in params]
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=8)
    first = [leaf[(0,) * (leaf.ndim - 1)][:4] for _, leaf in params if leaf.ndim and leaf.size]
    for values in jax.device_get(first):
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


class HandedOver:
    """A request whose prompt another engine computes.

    Args:
        deliver: receives the pieces.
        resume: continues a handover; see `Engine.resume`.
        pending: contains this object until the prompt is computed.
    """

    def __init__(
        self,
        deliver: Deliver,
        resume: Callable[[Handover, Deliver], Callable[[], None]],
        pending: set[HandedOver],
    ):
        self._deliver, self._resume, self._pending = deliver, resume, pending
        self._lock, self._is_cancelled = threading.Lock(), False
        self._cancels: list[Callable[[], None]] = []

    def start(self, export: Callable[[DeliverHandover], Callable[[], None]]) -> None:
        """Starts to compute the prompt. For the errors see `Engine.export`."""
        self._pending.add(self)
        try:
            self._cancels.append(export(self._received))
        except BaseException:
            self._pending.discard(self)
            raise

    def cancel(self) -> None:
        """Ends the request, from any thread, wherever it is."""
        with self._lock:
            self._is_cancelled, cancels = True, list(self._cancels)
        for cancel in cancels:
            cancel()

    def _received(self, found: Handover | Piece | AxcoreError) -> None:
        self._pending.discard(self)
        if not isinstance(found, Handover):
            self._deliver(found)
            return
        try:
            cancel = self._resume(found, self._deliver)
        except AxcoreError as error:
            self._deliver(error)
            return
        with self._lock:
            self._cancels.append(cancel)
            is_cancelled = self._is_cancelled
        if is_cancelled:
            cancel()
