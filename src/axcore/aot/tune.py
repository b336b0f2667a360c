"""Measuring the settings and the order of kernels on this machine's device."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from axcore.aot.explain import built, kernel_choices, layout_for
from axcore.config import Config, ConfigError
from axcore.config.tree import get
from axcore.nn import (
    AttentionInputs,
    AttentionKernel,
    ChooseKernel,
    Contiguous,
    Dropout,
    KernelRequest,
    TokenInfo,
    TunableKernel,
    refusal,
)
from axcore.nn.attention.tuned import TuningFile, kernel_name

DOCUMENTS = 4
"""Number of documents in a packed row."""


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


def tune(cfg: Config, target: str | None = None, repeats: int = 10) -> Tuned:
    """Times every kernel that the config names, with every candidate of its settings, for each distinct attention call.

    Args:
        cfg: the config of a trainer or of a model.
        target: the accelerator of the config, whose devices must be of the kind of this machine; None: this machine.
        repeats: number of measured passes, of which the median counts.

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
    for path, choice in kernel_choices(cfg, layout).items():
        if problem := choice.problem():
            raise ConfigError(problem)
        node = get(cfg, path)
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
    """The median time of a pass: forward, and backward in training."""
    inputs = example(request)
    kv = inputs.plain

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        found: jax.Array = kernel(inputs.replace(q=q, kv=dataclasses.replace(kv, k=k, v=v)))[0]
        return found

    def both(*arrays: jax.Array) -> object:
        heads, pull = jax.vjp(run, *arrays)
        return heads, pull(jnp.ones_like(heads))

    compiled = jax.jit(both if request.training else run)
    arrays = inputs.q, kv.k, kv.v
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first compiles


def example(request: KernelRequest) -> AttentionInputs:
    """Random inputs of a request without a bias. Packed rows have documents of equal length."""

    def tokens(length: int) -> TokenInfo:
        index = jnp.arange(length, dtype=jnp.int32)[None]
        segments = jnp.broadcast_to(1 + index * DOCUMENTS // length, (request.batch, length))
        valid = jnp.ones((1, length), bool) if request.partial else None
        return TokenInfo(index, index, segments if request.packed else None, valid, valid_first=request.valid_first)

    key = tokens(request.key_len)
    sizes = {
        "q": (request.query_len, request.num_heads, request.head_dim),
        "k": (request.key_len, request.num_kv_heads, request.head_dim),
        "v": (request.key_len, request.num_kv_heads, request.value_dim),
    }
    q, k, v = (
        jax.random.normal(jax.random.key(number), (request.batch, *size)).astype(request.dtype)
        for number, size in enumerate(sizes.values())
    )
    return AttentionInputs(
        q,
        Contiguous(k, v, key),
        key if request.aligned else tokens(request.query_len),
        sinks=jnp.zeros(request.num_heads) if "sinks" in request.options else None,
        dropout=Dropout(jax.random.key(3), None, None, 0.1) if "dropout" in request.options else None,
        scale=request.scale,
        mask=request.mask,
        softcap=30.0 if "softcap" in request.options else None,
        phase=request.phase,
        training=request.training,
        return_lse="lse" in request.options,
    )
