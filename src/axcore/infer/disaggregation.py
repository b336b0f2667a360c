"""Disaggregated prefill: an engine computes a prompt, and another engine continues it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np
from jaxtyping import Array, Shaped

from axcore.config import AxcoreError, ConfigError, flatten
from axcore.infer.handover import DeliverHandover, Export, Handover, Prefill
from axcore.infer.requests import Piece, Request
from axcore.infer.row_state import RowState, StateLayout
from axcore.infer.streams import Deliver
from axcore.module import Layer, functional
from axcore.train.run.identity import is_layout, layout_fields


class Queue(Protocol):
    """Queues a checked request, and returns a function that cancels it.

    Args:
        request, deliver, sample: see `Engine.submit`.
        handover: the prompt and the first token, which another engine has computed.
        export: receives the first token and the state of the prompt, in place of a call of `deliver`. The sample ends
            with its first token.
    """

    def __call__(
        self,
        request: Request,
        deliver: Deliver,
        *,
        sample: int,
        handover: Handover | None = None,
        export: Export | None = None,
    ) -> Callable[[], None]: ...


class Handovers:
    """The handovers of an engine to others and from others.

    Args:
        model: the model. Other engines must have the same.
        layout: the arrays of the decoding state.
        vocab_size: the number of token ids.
        prefill: computes the prompts of this engine; None: the engine itself does.
        check: checks a request; see `Engine.check`.
        queue: queues a request in the engine.
    """

    def __init__(
        self,
        model: Layer,
        layout: StateLayout,
        vocab_size: int,
        prefill: Prefill | None,
        *,
        check: Callable[[Request], None],
        queue: Queue,
    ):
        self.prefill, self._identity = prefill, ModelIdentity(model)
        self._layout, self._vocab_size, self._check, self._queue = layout, vocab_size, check, queue
        self._pending: set[HandedOver] = set()

    @property
    def num_pending(self) -> int:
        """The number of samples whose prompt another engine computes."""
        return len(self._pending)

    def submit(self, request: Request, deliver: Deliver, *, sample: int) -> Callable[[], None]:
        """Lets `prefill` compute the prompt of a request, and continues it here. See `Engine.submit`."""
        assert self.prefill is not None
        handed = HandedOver(deliver, functools.partial(self.resume, request, sample=sample), self._pending)
        handed.start(functools.partial(self.prefill.export, request, sample=sample))
        return handed.cancel

    def export(self, request: Request, deliver: DeliverHandover, *, sample: int) -> Callable[[], None]:
        """Computes the prompt of a request and its first token, for another engine that continues it with `resume`.

        Args:
            request: the prompt and the options. Stop strings are left to the other engine.
            deliver: receives the handover. Its arrays are on the devices of this engine.
            sample: see `Engine.submit`.

        Returns:
            A function that cancels the request.

        Raises:
            ConfigError: the prompt does not fit; see `Engine.check`.
            AxcoreError: the engine is closed.
        """
        options = request.options
        first = dataclasses.replace(options, max_tokens=1, min_tokens=min(options.min_tokens, 1), stop=())
        request = dataclasses.replace(request, options=first)
        self._check(request)

        def exported(piece: Piece, state: RowState, adapter: str | None) -> None:
            logprob = piece.logprobs[0] if piece.logprobs else None
            ids = request.ids + piece.ids
            deliver(Handover(self._identity.text, adapter, ids, state, logprob, piece.prompt_logprobs))

        return self._queue(request, deliver, sample=sample, export=exported)

    def resume(self, request: Request, handover: Handover, deliver: Deliver, *, sample: int) -> Callable[[], None]:
        """Continues a request whose prompt another engine has computed. It delivers the first token, too, or an error
        if the other engine has other weights of the adapter.

        Args:
            request: the request that was exported.
            handover: what the other engine delivered.
            deliver, sample: see `Engine.submit`.

        Returns:
            A function that cancels the request.

        Raises:
            ConfigError: the request does not fit, or the handover belongs to another request, another model, or an
                engine with another cache.
            AxcoreError: the engine is closed.
        """
        self._check(request)
        handover.check(request, self._identity.text)
        self._layout.check(handover.state)
        if not 0 <= handover.ids[-1] < self._vocab_size:
            raise ConfigError(f"handover: token id {handover.ids[-1]} is not below {self._vocab_size}")
        return self._queue(request, deliver, sample=sample, handover=handover)


class ModelIdentity:
    """Identifies a model: a hash of what its config computes, and of the shape and the first values of each parameter.

    Kernels, caches and meshes do not change it. Models that differ in later values only have the same identity.
    """

    def __init__(self, model: Layer):
        params = jax.tree.leaves_with_path(functional(model)[1])
        self._config, self._name = model.config, type(model).__name__
        self._forms = [f"{jax.tree_util.keystr(path)} {leaf.dtype}{leaf.shape}" for path, leaf in params]
        # The weights may be freed before the identity is needed. This program is all that every engine pays for it.
        self._first = _first_values([leaf for _, leaf in params if leaf.ndim and leaf.size])

    @functools.cached_property
    def text(self) -> str:
        """The hash."""
        fields = layout_fields(self._config)
        parts = [f"{path}={text}" for path, text in flatten(self._config).items() if not is_layout(path, fields)]
        digest = hashlib.blake2b("\n".join([self._name, *sorted(parts), *self._forms]).encode(), digest_size=8)
        for values in jax.device_get(self._first):
            digest.update(np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()


@jax.jit
def _first_values(leaves: list[Shaped[Array, ...]]) -> list[Shaped[Array, " values"]]:
    return [leaf[(0,) * (leaf.ndim - 1)][:4] for leaf in leaves]


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
