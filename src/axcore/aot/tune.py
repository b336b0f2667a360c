"""Measuring the settings and the order of kernels on this machine's device."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from axcore.aot.explain import built, choices_of, layout_for
from axcore.config import Config, ConfigError
from axcore.config.tree import get
from axcore.infer import Engine
from axcore.nn import (
    AttentionInputs,
    AttentionKernel,
    ChooseKernel,
    Contiguous,
    Dropout,
    InCache,
    KernelRequest,
    KVView,
    Latent,
    Paged,
    TokenInfo,
    TunableKernel,
    refusal,
)
from axcore.nn.attention.tuned import TuningFile, kernel_name
from axcore.nn.kv.codes import encoded

DOCUMENTS = 4
"""Number of documents in a packed row."""
CALLS = 16
"""Calls of an engine's kernel that are measured in one program."""
Arrays = tuple[Any, ...]  # Any: arrays, or a view


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of one kernel with one candidate of its settings.

    Attributes:
        seconds: of one forward and backward pass; None if it failed.
        problem: why it failed, or why the kernel does not support the request.
    """

    request: KernelRequest
    kernel: str
    settings: Mapping[str, int]
    seconds: float | None
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of `tune`. Its text is a table for each request, the fastest first."""

    device_kind: str
    timings: tuple[Timing, ...]

    def best(self, request: KernelRequest) -> dict[str, Timing]:
        """Name of a kernel -> its fastest timing, the fastest kernel first."""
        ran = [each for each in self.timings if each.request == request and each.seconds is not None]
        found: dict[str, Timing] = {}
        for each in sorted(ran, key=lambda each: each.seconds or 0.0):
            found.setdefault(each.kernel, each)
        return found

    def file(self) -> TuningFile:
        """The fastest settings of each tunable kernel, and the kernels by their mean time relative to the fastest."""
        kernels: dict[str, dict[str, Mapping[str, int]]] = {}
        relative: dict[str, list[float]] = {}
        for request in dict.fromkeys(each.request for each in self.timings):
            best = self.best(request)
            for name, timing in best.items():
                fastest = next(iter(best.values())).seconds
                relative.setdefault(name, []).append((timing.seconds or 0.0) / (fastest or 1.0))
                if timing.settings:
                    kernels.setdefault(name, {})[request.signature] = dict(timing.settings)
        order = sorted(relative, key=lambda name: statistics.mean(relative[name]))
        return TuningFile(self.device_kind, kernels, tuple(order))

    def __str__(self) -> str:
        lines = [f"device: {self.device_kind}"]
        for request in dict.fromkeys(each.request for each in self.timings):
            lines += ["", str(request)]
            mine = [each for each in self.timings if each.request == request]
            for each in sorted(mine, key=lambda each: float("inf") if each.seconds is None else each.seconds):
                settings = ", ".join(f"{name}={value}" for name, value in each.settings.items())
                shown = f"no: {each.problem}" if each.seconds is None else f"{1e3 * each.seconds:9.3f} ms"
                lines.append(f"  {each.kernel:<16} {shown}  {settings}".rstrip())
        return "\n".join(lines)


def tune(cfg: Config, target: str | None = None, repeats: int = 10, *, engine: Engine.Config | None = None) -> Tuned:
    """Times every kernel that the config names, with every candidate of its settings, for each distinct attention call.

    Args:
        cfg: the config of a trainer or of a model.
        target: the accelerator of the config, whose devices must be of the kind of this machine; None: this machine.
        repeats: number of measured passes, of which the median counts.
        engine: an engine on one device, whose attention calls are measured, too; None: only calls of training.

    Raises:
        ConfigError: this machine has devices of another kind, or no kernel supports a call.
    """
    device = jax.devices()[0]
    layout = layout_for(cfg, target)
    if layout is not None and (layout.platform, layout.device_kind) != (device.platform, device.device_kind):
        raise ConfigError(
            f"{target} has {layout.device_kind or layout.platform} devices, and this machine has "
            f"{device.device_kind}. Run `axcore tune` on the target"
        )
    pairs: dict[tuple[KernelRequest, AttentionKernel.Config], None] = {}
    for path, choices in choices_of(cfg, layout, engine).items():
        node = get(cfg, path)
        for choice in choices:
            if not isinstance(choice.requests[0], KernelRequest):
                continue
            if problem := choice.problem():
                raise ConfigError(problem)
            for kernel in node.order if isinstance(node, ChooseKernel.Config) else (node,):
                pairs |= dict.fromkeys((request, kernel) for request in choice.requests)
    if not pairs:
        raise ConfigError("the config has no attention that chooses a kernel, so there is nothing to tune")
    found = [timing for request, kernel in pairs for timing in _timings(request, kernel, repeats)]
    return Tuned(device.device_kind, tuple(found))


def _timings(request: KernelRequest, cfg: AttentionKernel.Config, repeats: int) -> Iterator[Timing]:
    name, kernel = kernel_name(cfg), built(cfg, request)
    candidates: Sequence[Mapping[str, int]] = [{}]
    problem = refusal(kernel, request)
    if problem is None and "bias" in request.options:
        problem = "a bias depends on the model, so it is not measured"
    if problem is not None:
        yield Timing(request, name, {}, None, problem)
        return
    if isinstance(kernel, TunableKernel):
        candidates = list(kernel.candidates(request))
        cfg = cfg.set(tuning=None)
    for settings in candidates:
        try:
            yield Timing(request, name, settings, _seconds(built(cfg.set(**settings), request), request, repeats))
        except Exception as error:  # a candidate may need more memory than there is, or not compile
            yield Timing(request, name, settings, None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _seconds(kernel: AttentionKernel, request: KernelRequest, repeats: int) -> float:
    """The median time of a pass: forward, and backward in training. Calls of an engine are short, so several run in one
    program, without the time of starting it."""
    inputs = example(request)
    if request.phase == "train":
        return _median(*_pass(kernel, inputs, request.training), repeats)

    def call(q: jax.Array, kv: KVView) -> jax.Array:
        def again(_: jax.Array, q: jax.Array) -> jax.Array:  # each call waits for the one before it
            heads: jax.Array = kernel(inputs.replace(q=q, kv=kv))[0]
            return q + 0 * heads[..., :1]

        return jax.lax.fori_loop(0, CALLS, again, q)

    return _median(call, (inputs.q, inputs.keys), repeats) / CALLS


def _pass(kernel: AttentionKernel, inputs: AttentionInputs, training: bool) -> tuple[Callable[..., object], Arrays]:
    """A forward pass, or in training a forward and backward pass, and its arguments."""
    kv = inputs.plain

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        found: jax.Array = kernel(inputs.replace(q=q, kv=dataclasses.replace(kv, k=k, v=v)))[0]
        return found

    def both(*arrays: jax.Array) -> object:
        heads, pull = jax.vjp(run, *arrays)
        return heads, pull(jnp.ones_like(heads))

    return both if training else run, (inputs.q, kv.k, kv.v)


def _median(run: Callable[..., object], arrays: Arrays, repeats: int) -> float:
    """The median time of a function on the device."""
    compiled = jax.jit(run)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first compiles


def example(request: KernelRequest) -> AttentionInputs:
    """Random inputs of a request without a bias. Packed rows have documents of equal length, and caches are full."""

    def tokens(length: int) -> TokenInfo:
        index = jnp.arange(length, dtype=jnp.int32)[None]
        segments = jnp.broadcast_to(1 + index * DOCUMENTS // length, (request.batch, length))
        valid = jnp.ones((1, length), bool) if request.partial else None
        return TokenInfo(index, index, segments if request.packed else None, valid, valid_first=request.valid_first)

    key = tokens(request.key_len)
    q, k, v = (
        jax.random.normal(jax.random.key(number), (request.batch, *size)).astype(request.dtype)
        for number, size in enumerate(
            (
                (request.query_len, request.num_heads, request.head_dim),
                (request.key_len, request.num_kv_heads, request.head_dim),
                (request.key_len, request.num_kv_heads, request.value_dim),
            )
        )
    )
    query = key
    if not request.aligned:
        # A part of a prompt may be padded to more tokens than a row has.
        last = jnp.maximum(jnp.arange(request.key_len - request.query_len, request.key_len, dtype=jnp.int32), 0)[None]
        query = dataclasses.replace(tokens(request.query_len), index=last, positions=last)
    return AttentionInputs(
        q,
        _view(request, k, v, key),
        query,
        sinks=jnp.zeros(request.num_heads) if "sinks" in request.options else None,
        dropout=Dropout(jax.random.key(3), None, None, 0.1) if "dropout" in request.options else None,
        scale=request.scale,
        mask=request.mask,
        softcap=30.0 if "softcap" in request.options else None,
        phase=request.phase,
        training=request.training,
        return_lse="lse" in request.options,
    )


def _view(request: KernelRequest, k: jax.Array, v: jax.Array, tokens: TokenInfo) -> KVView:
    """A view of the kind that the request reads."""
    if request.view is Latent:
        return Latent(_view(dataclasses.replace(request, view=Contiguous), k, v, tokens), request.value_dim)
    if request.view is Contiguous:
        return Contiguous(k, v, tokens)
    scales, read_as = None, None
    if request.codes is not None:
        (k, k_scales), (v, v_scales) = encoded(k, request.codes), encoded(v, request.codes)
        scales, read_as = (k_scales, v_scales), request.dtype
    if request.view is InCache:
        return InCache(k, v, tokens, scales=scales, read_as=read_as)
    if request.view is not Paged or request.page_size is None:
        raise ConfigError(f"there is no example of a {request.view.__name__}, so it is not measured")
    size, count = request.page_size, -(-request.key_len // request.page_size)

    def in_pages(x: jax.Array) -> jax.Array:
        padding = [(0, 0), (0, count * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, padding).reshape(request.batch * count, size, *x.shape[2:])

    table = jnp.arange(request.batch * count, dtype=jnp.int32).reshape(request.batch, count)
    lengths = jnp.full((request.batch,), request.key_len, jnp.int32)
    pool, scales = (in_pages(k), in_pages(v)), jax.tree.map(in_pages, scales)
    return Paged(*pool, table, tokens, lengths, scales=scales, read_as=read_as)
