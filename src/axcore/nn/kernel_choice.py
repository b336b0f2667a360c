"""Choosing a kernel for what an attention asks, and running it."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from axcore.config import Config, ConfigError, Where, has_field, select
from axcore.module import Frame, Rngs, current
from axcore.module.context import locate
from axcore.nn.kernels import AttentionKernel, KernelRequest, ReferenceKernel, refusal
from axcore.nn.masks import Mask
from axcore.nn.tokens import TokenInfo
from axcore.parallel import active_layout, is_sharded, shard_map
from axcore.plugin import AttentionKernel as Offer, PluginError, registry, resolve
from axcore.plugin.slots import put


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which kernel an attention runs.

    Attributes:
        path: of the kernel slot; a layer of a scanned stack shows as `*`.
        request: what it asks.
        kernel: the layer that runs; None where none can, which is an error unless choices are recorded.
        refused: why each earlier kernel of the order does not.
    """

    path: str
    request: KernelRequest
    kernel: AttentionKernel | None
    refused: tuple[tuple[AttentionKernel, str], ...]


_choices: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar("axcore_choices", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Choice]]:
    """Collects the choice of every attention that is traced meanwhile. Where no kernel can serve, zeros do."""
    found: list[Choice] = []
    token = _choices.set(found)
    try:
        yield found
    finally:
        _choices.reset(token)


class ChooseKernel(AttentionKernel):
    """The first kernel of an order that can do what the attention asks."""

    class Config(AttentionKernel.Config):
        input_dim: int | None = None
        num_heads: int | None = None
        num_kv_heads: int | None = None
        order: tuple[AttentionKernel.Config, ...] = (ReferenceKernel.Config(),)

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        if not cfg.order:
            raise ConfigError("order is empty; it must name at least one kernel")
        widths = {name: getattr(cfg, name) for name in ("input_dim", "num_heads", "num_kv_heads", "head_dim")}
        self.order = self.children("order", cfg.order, rngs, **widths)

    def supports(self, request: KernelRequest) -> str | None:
        refused = [(kernel, refusal(kernel, request)) for kernel in self.order]
        if any(reason is None for _, reason in refused):
            return None
        return "; ".join(f"{type(kernel).__name__}: {reason}" for kernel, reason in refused)

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, query: TokenInfo, key: TokenInfo, **options: Any
    ) -> jax.Array:
        """See `AttentionKernel`."""
        request = KernelRequest.of(q, k, v, mask, query, key, **options)
        refused: list[tuple[AttentionKernel, str]] = []
        for kernel in self.order:
            if (reason := refusal(kernel, request)) is None:
                _record(Choice(self.frame.path, request, kernel, tuple(refused)))
                return _run(kernel, request, q, k, v, mask, query, key, options)
            refused.append((kernel, reason))
        return _none(Choice(self.frame.path, request, None, tuple(refused)), q, v)


def attend(
    kernel: AttentionKernel,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    query: TokenInfo,
    key: TokenInfo,
    **options: Any,
) -> jax.Array:
    """Runs a kernel, or the one that it chooses, as `AttentionKernel` says.

    Raises:
        ConfigError: the kernel cannot do it; the message names the path and the reason.
    """
    options = {name: value for name, value in options.items() if value is not None}
    if isinstance(kernel, ChooseKernel):
        return kernel(q, k, v, mask, query, key, **options)
    path, request = _path(kernel), KernelRequest.of(q, k, v, mask, query, key, **options)
    if (reason := refusal(kernel, request)) is not None:
        return _none(Choice(path, request, None, ((kernel, reason),)), q, v)
    _record(Choice(path, request, kernel, ()))
    return _run(kernel, request, q, k, v, mask, query, key, options)


def _record(choice: Choice) -> None:
    if (choices := _choices.get()) is not None:
        choices.append(choice)


def _path(kernel: AttentionKernel) -> str:
    """Where the kernel stands: below the nearest frame whose module holds it."""
    frame: Frame | None = current()
    while frame is not None:
        names = locate(frame.module, kernel) if frame.module is not None else None
        if names is not None:
            return frame.below(".".join(names))
        frame = frame.parent
    return type(kernel).__name__


def _none(choice: Choice, q: jax.Array, v: jax.Array) -> jax.Array:
    if _choices.get() is not None:
        _record(choice)
        return _zeros(q, v)
    reasons = "; ".join(f"{type(kernel).__name__} cannot do this: {reason}" for kernel, reason in choice.refused)
    raise ConfigError(
        f"{choice.path}: {reasons}. Choose another kernel, or several in order: "
        f'use("kernels", order=("...", "reference"))'
    )


def _zeros(q: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)


def _run(
    kernel: AttentionKernel,
    request: KernelRequest,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    query: TokenInfo,
    key: TokenInfo,
    options: dict[str, Any],
) -> jax.Array:
    here = jax.default_backend()
    if request.platform != here and refusal(kernel, dataclasses.replace(request, platform=here)) is not None:
        return _zeros(q, v)  # see on_platform
    layout = active_layout()
    if not kernel.local or layout is None or not is_sharded():
        return kernel(q, k, v, mask, query, key, **options)
    rows, _, heads, _ = whole = layout.spec(("batch", None, "head", None))
    of_keys = layout.spec(("batch", None, "kv_head", None))

    def of_tokens(x: jax.Array) -> PartitionSpec:  # [batch or 1, seq]
        return PartitionSpec(rows if x.shape[0] > 1 else None, None)

    arrays = {name: value for name, value in options.items() if isinstance(value, jax.Array)}
    static = {name: value for name, value in options.items() if name not in arrays}

    def body(kernel: Any, q: Any, k: Any, v: Any, query: Any, key: Any, arrays: Any) -> jax.Array:
        return kernel(q, k, v, mask, query, key, **static, **arrays)

    specs = (whole, of_keys, of_keys, jax.tree.map(of_tokens, query), jax.tree.map(of_tokens, key))
    mapped = shard_map(body, in_specs=(*specs, dict.fromkeys(arrays, PartitionSpec(heads))), out_specs=whole)
    return mapped(kernel, q, k, v, query, key, arrays)


def use_kernels(cfg: Config, order: tuple[str, ...], where: Where | None = None) -> Config:
    """Gives every selected attention the first kernel of `order` that can do what it asks, in each call.

    Args:
        order: names of attention kernels that plugins offer; `reference` is the core's and can do everything.
        where: which attentions; None: all that have a kernel slot.
    """
    found = []
    for name in order:
        offer = registry().find(Offer, name)
        if offer is None:
            known = ", ".join(sorted(each.name for _, each in registry().offers(Offer)))
            raise PluginError(f"no installed plugin offers the attention kernel {name!r}; known: {known}")
        found.append(resolve(*offer).Config())
    return put_kernel(cfg, ChooseKernel.Config(order=tuple(found)), where)


def put_kernel(cfg: Config, kernel: AttentionKernel.Config, where: Where | None = None) -> Config:
    """Gives every selected attention a kernel. One that wraps another, as differential attention does, goes on
    wrapping: the kernel goes below it."""
    chosen = where if where is not None else lambda _, node: has_field(node, "kernel")
    return select(cfg, chosen).map(lambda _, node: put(node, "kernel", kernel))
