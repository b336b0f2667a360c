"""Choosing the kernel of an attention call, and running it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from axcore.config import Config, ConfigError, PositiveInt, Where, has_field, select
from axcore.module import Frame, Rngs, current
from axcore.module.context import locate
from axcore.nn.attention.inputs import LSE, AttentionInputs, Heads
from axcore.nn.attention.kernel import AttentionKernel, TunableKernel, checked, refusal
from axcore.nn.attention.reference import ReferenceKernel
from axcore.nn.attention.request import OPTIONS, KernelRequest
from axcore.nn.attention.sharded import Shards, readable, wraps
from axcore.nn.choosing import choose, is_recording
from axcore.nn.kv.views import KVView
from axcore.plugin import AttentionKernelOffer as Offer, PluginError, registry, resolve


class ChooseKernel(AttentionKernel):
    """Runs the first kernel of `order` that supports the call.

    A call that no kernel supports raises. There is no fallback to a kernel outside `order`.
    """

    class Config(AttentionKernel.Config):
        input_dim: PositiveInt | None = None
        num_heads: PositiveInt | None = None
        num_kv_heads: PositiveInt | None = None
        order: tuple[AttentionKernel.Config, ...] = (ReferenceKernel.Config(),)

    takes = frozenset(OPTIONS)
    views = (KVView,)
    local = False

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

    def __call__(self, inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
        """See `AttentionKernel`."""
        return _first(tuple(self.order), self.frame.path, inputs)

    def backward(self, inputs: AttentionInputs, heads: Heads, lse: LSE, heads_grad: Heads) -> AttentionInputs:
        """Calls `backward` of the kernel that ran: the first of `order` that supports the call."""
        for kernel in self.order:
            if refusal(kernel, KernelRequest.of(readable(kernel, inputs))) is None:
                gradients: AttentionInputs = kernel.backward(inputs, heads, lse, heads_grad)
                return gradients
        raise ConfigError(f"{self.frame.path}: no kernel in order supports the call ({KernelRequest.of(inputs)})")


def attend(kernel: AttentionKernel, inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
    """Runs a kernel on every device of the active layout. A `ChooseKernel` runs the kernel that it chooses.

    Returns:
        The heads, and the log-sum-exp (lse) if `inputs.return_lse`.

    Raises:
        ConfigError: no kernel supports the call. The message has the path, the request and the reasons.
    """
    if isinstance(kernel, ChooseKernel):
        return kernel(inputs)
    return _first((kernel,), _path(kernel), inputs)


def _first(kernels: tuple[AttentionKernel, ...], path: str, inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
    """Runs the first kernel that supports the call."""
    shards = Shards.of(inputs)
    if shards is not None:
        shards.check(inputs, path)
    kernel_inputs = inputs

    def requests(kernel: AttentionKernel) -> tuple[KernelRequest, ...]:
        nonlocal kernel_inputs
        kernel_inputs = readable(kernel, inputs)
        return (KernelRequest.of(kernel_inputs),) if shards is None else shards.requests(kernel, kernel_inputs)

    choice = choose(
        path,
        kernels,
        requests,
        lambda kernel, requests: refusal(kernel, *requests),
        failure="no kernel supports the call",
        remedy='Choose another kernel, or several in order: use("kernels", order=("...", "reference"))',
        settings=lambda kernel, requests: _settings(kernel, path, requests),
    )
    kernel: AttentionKernel | None = choice.chosen
    if is_recording():
        # A kernel that wraps another still runs, so that the choice inside it is recorded.
        return kernel(kernel_inputs) if kernel is not None and wraps(kernel) else _zeros(inputs)
    assert kernel is not None
    _warn_unmeasured(kernel, choice.requests)
    tagged = kernel.tags_heads or wraps(kernel)
    if shards is not None and shards.runs(kernel):
        result = shards.run(kernel, kernel_inputs, path)
        tagged = tagged or (shards.context is not None and shards.context.tags_heads)
    else:
        result = kernel(kernel_inputs)
    heads, lse = checked(kernel, path, kernel_inputs, result)
    return heads if tagged else checkpoint_name(heads, "heads"), lse


def _settings(kernel: AttentionKernel, path: str, requests: tuple[KernelRequest, ...]) -> tuple[Mapping[str, int], ...]:
    """The settings of each request, which raise here if they were measured on another device."""
    if not isinstance(kernel, TunableKernel):
        return ()
    try:
        return tuple(kernel.settings(request) for request in requests)
    except ConfigError as error:
        raise ConfigError(f"{path}: {type(kernel).__name__}: {error}") from error


def _warn_unmeasured(kernel: AttentionKernel, requests: tuple[KernelRequest, ...]) -> None:
    """Warns if a training call uses default settings although the kernel has measured ones. Python shows a repeated
    warning once. Calls of an engine are measured only if its sizes were given to `axcore tune`."""
    if not isinstance(kernel, TunableKernel) or (tuning := kernel.config.tuning) is None:
        return
    for request in requests:
        if request.phase != "train" or tuning.find(request) is not None:
            continue
        used = {name: value for name, value in kernel.settings(request).items() if getattr(kernel.config, name) is None}
        if not used:
            continue
        shown = ", ".join(f"{name}={value}" for name, value in used.items())
        warnings.warn(
            f"{type(kernel).__name__}: its tuning has no settings for the call {request.signature!r}, which runs with "
            f"the defaults {shown}; measured: {', '.join(map(repr, tuning.settings)) or 'nothing'}. Measure again with "
            f"`axcore tune RECIPE --out FILE`, or set tuning=None",
            stacklevel=2,
        )


def _path(kernel: AttentionKernel) -> str:
    """Path of the kernel, found through the nearest frame whose module contains it."""
    frame: Frame | None = current()
    while frame is not None:
        names = locate(frame.module, kernel) if frame.module is not None else None
        if names is not None:
            return frame.below(".".join(names))
        frame = frame.parent
    return type(kernel).__name__


def _zeros(inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
    """Placeholders for the results of a kernel, while only choices are recorded."""
    shape = inputs.q.shape[:3]
    lse = jnp.zeros(shape) if inputs.return_lse else None
    return jnp.zeros((*shape, inputs.keys.value_dim), inputs.q.dtype), lse


def use_kernels(cfg: Config, order: tuple[str, ...], where: Where | None = None) -> Config:
    """Makes every selected attention run, for each call, the first kernel of `order` that supports the call.

    Args:
        order: names of attention kernels that plugins offer. The kernel `reference` of the core supports every call.
        where: selects attention layers; None: every node with a kernel slot.

    Raises:
        PluginError: no installed plugin offers a kernel of one of these names.
    """
    found = []
    for name in order:
        offer = registry.find(Offer, name)
        if offer is None:
            known = ", ".join(sorted(each.name for _, each in registry().offers(Offer)))
            raise PluginError(f"no installed plugin offers the attention kernel {name!r}; known: {known}")
        found.append(resolve(*offer).Config())
    return put_kernel(cfg, ChooseKernel.Config(order=tuple(found)), where)


def put_kernel(cfg: Config, kernel: AttentionKernel.Config, where: Where | None = None) -> Config:
    """Fills the kernel slot of every selected attention.

    If the slot already contains a kernel that wraps another, as differential attention does, the inner kernel is
    replaced.

    Args:
        where: selects attention layers; None: every node with a kernel slot.
    """
    chosen = where if where is not None else lambda _, node: has_field(node, "kernel")
    return select(cfg, chosen).put(kernel=kernel)
