"""The memory, FLOPs, communication and estimated time of a compiled program on a target: `compile_program`."""

from __future__ import annotations

import dataclasses
import json
import pickle
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.experimental import serialize_executable

from axcore.aot.chips import GIB
from axcore.aot.flops import Flops, count_flops
from axcore.aot.lowering import Lowered, ProgramName, lower
from axcore.aot.memory import Memory, bytes_per_device, count_per_device
from axcore.aot.roofline import Estimate
from axcore.aot.targets import Target
from axcore.aot.traffic import Traffic, count_traffic
from axcore.config import AxcoreError, OutOfMemory, allocating
from axcore.config.memory import size
from axcore.train import Trainer


@dataclasses.dataclass(frozen=True)
class CollectiveCost:
    """The collectives of one kind over the same mesh axes, in one run.

    Attributes:
        crosses_hosts, members_per_host: see `axcore.aot.traffic.Collective`.
        sent: bytes that each device sends.
    """

    kind: str
    axes: tuple[str, ...]
    crosses_hosts: bool
    members_per_host: int
    calls: float
    sent: float


@dataclasses.dataclass(frozen=True)
class Report:
    """A compiled program of one config on a target. Bytes and FLOPs are per device and run.

    Attributes:
        target: the accelerator, such as `gpu-h100-8x4`.
        mesh: the size of each mesh axis.
        tokens: the tokens of one run, on all devices together.
        parameters: the number of parameters of the model.
        parameters_per_device: the number of parameters on each device.
        state_bytes: bytes of the parameters, and of the optimizer state or the KV cache, by name.
        limit: bytes that a program may use.
        flops: operations of matrix products and kernels, by dtype. Loop bodies are counted as often as they run.
        uncounted: opaque calls that are not in `flops`, and loops of unknown length, with their numbers.
        model_flops: operations without recomputation: for training, three times those of the forward pass.
        memory_traffic: bytes read from and written to memory; None if the compiler rejected the program.
        estimate: the estimated time; None if the compiler rejected the program.
    """

    program: ProgramName
    target: str
    device_kind: str
    devices: int
    hosts: int
    mesh: dict[str, int]
    tokens: int
    parameters: int
    parameters_per_device: int
    state_bytes: dict[str, int]
    memory: Memory
    limit: int
    flops: dict[str, float]
    uncounted: dict[str, int]
    model_flops: float
    memory_traffic: float | None
    collectives: tuple[CollectiveCost, ...]
    unknown_loops: int
    estimate: Estimate | None
    trace_seconds: float
    compile_seconds: float
    jax_version: str = jax.__version__

    @property
    def headroom(self) -> int:
        """Bytes that remain below the limit; negative if the program does not fit."""
        return self.limit - self.memory.total

    @property
    def fits(self) -> bool:
        return self.headroom >= 0 and not self.memory.out_of_memory

    @property
    def verdict(self) -> str:
        """Whether the program fits, and by how much."""
        of = f"of {self.limit / GIB:.2f} GiB on each {self.device_kind}"
        if self.fits:
            return f"fits: {self.headroom / GIB:.2f} GiB {of} remain"
        return f"does not fit: {-self.headroom / GIB:.2f} GiB more than the limit {of}"

    def to_json(self) -> str:
        """The report as JSON, with the fields `fits` and `headroom`."""
        facts = dataclasses.asdict(self) | {"fits": self.fits, "headroom": self.headroom}
        return json.dumps(facts, indent=2).replace("NaN", "null")

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """The report as titled lists of (name, value)."""
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items() if size > 1) or "one device"
        hosts = f" on {self.hosts} {'slices' if self.target.startswith('tpu') else 'hosts'}" if self.hosts > 1 else ""
        plan = [
            ("program", f"{self.program}, {self.tokens:,} tokens"),
            ("target", f"{self.target}: {self.devices} x {self.device_kind}{hosts}"),
            ("mesh", mesh),
            ("parameters", f"{self.parameters:,}, of which {self.parameters_per_device:,} per device"),
        ]
        sections = [("program", plan), ("memory per device", self._memory())]
        compute = [(f"FLOPs in {dtype}", f"{count:.4g}") for dtype, count in sorted(self.flops.items())]
        compute += [("model FLOPs", f"{self.model_flops:.4g}")] if self.model_flops else []
        compute += [("not counted", f"{name}, {count} times") for name, count in self.uncounted.items()]
        if self.memory_traffic is not None:
            compute.append(("memory traffic", _bytes(self.memory_traffic)))
        sections.append(("work per device and run", compute))
        if self.collectives:
            sections.append(("collectives per device and run", [_collective(each) for each in self.collectives]))
        if self.estimate is not None:
            sections.append(("estimate (not a measurement)", self._estimate(self.estimate)))
        times = [("trace", f"{self.trace_seconds:.1f} s"), ("compile", f"{self.compile_seconds:.1f} s")]
        return [*sections, (f"compilation with jax {self.jax_version}", times)]

    def _memory(self) -> list[tuple[str, str]]:
        memory = self.memory
        rows = [(name, _bytes(count)) for name, count in self.state_bytes.items()]
        if memory.out_of_memory:
            rows += [("total, according to the compiler", _bytes(memory.total))]
        else:
            rows += [
                ("arguments", _bytes(memory.arguments)),
                ("temporaries", _bytes(memory.temporaries)),
                ("outputs", f"{_bytes(memory.outputs)}, of which {_bytes(memory.donated)} in donated arguments"),
                ("total", _bytes(memory.total)),
            ]
            rows += [("peak, according to the compiler", _bytes(memory.peak))] if memory.peak else []
            rows += [("on the host", _bytes(memory.host))] if memory.host else []
        return [*rows, ("limit", _bytes(self.limit)), ("verdict", self.verdict)]

    def _estimate(self, estimate: Estimate) -> list[tuple[str, str]]:
        rows = [
            (f"{name} at its peak", _seconds(getattr(estimate, name)))
            for name in ("compute", "memory", "link", "network")
            if getattr(estimate, name)
        ]
        speed = f", {self.tokens / estimate.step / self.devices:,.0f} tokens/s per device" if estimate.step else ""
        rows += [
            ("run, at least", _seconds(estimate.bound)),
            ("run, estimated", _seconds(estimate.step) + speed),
        ]
        if estimate.without_overlap > estimate.step:
            rows.append(("run, without overlap", _seconds(estimate.without_overlap)))
        if self.model_flops:
            rows += [("MFU, at most", f"{estimate.mfu_bound:.1%}"), ("MFU, estimated", f"{estimate.mfu:.1%}")]
        loops = f" {self.unknown_loops} loops of unknown length are counted once." if self.unknown_loops else ""
        return [*rows, ("method", estimate.method + loops)]

    def __str__(self) -> str:
        lines = []
        for title, rows in self.sections():
            lines += [title, *(f"  {name:32} {value}" for name, value in rows)]
        return "\n".join(lines)


def compile_program(
    cfg: Trainer.Config,
    target: str | None = None,
    program: ProgramName = "train",
    executable: str | Path | None = None,
) -> Report:
    """Compiles a program of a trainer's config for hardware that this machine need not have, and reports what it needs.

    ```python
    report = compile_program(axcore.pipe(recipe, axcore.target("gpu-h100-8")), "gpu-h100-8")
    print(report.fits, report)
    ```

    Args:
        target: the accelerator; None: the devices of this process. The mesh of the config must use all of its devices.
        program: `train`: the step of the trainer. `prefill`: a step over whole prompts. `decode`: a step of one token
            per row.
        executable: a file to which the compiled program is written, as a pickle of the three arguments of
            `jax.experimental.serialize_executable.deserialize_and_load`.

    Raises:
        ConfigError: the target is unknown, its compiler is not installed, or the config does not fit it.
        AxcoreError: the compiler rejected the program for a reason other than memory, or it rejected the program and
            `executable` is given.
    """
    found = Target.of(target) if target is not None else Target.local()
    began = time.monotonic()
    lowered = lower(cfg, found, program)
    flops = count_flops(lowered.traced.jaxpr, lowered.table)
    forward = count_flops(lowered.forward().jaxpr).total if lowered.forward is not None else flops.total / 3
    traced = time.monotonic()
    compiled: jax.stages.Compiled | None = None
    try:
        with allocating(f"the program on {found.accelerator.text}", "Use more devices, or reduce its batch"):
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise AxcoreError(f"the compiler for {found.accelerator.text} rejects the program: {error}") from error
    except OutOfMemory as error:
        memory = Memory.of_out_of_memory(error, sum(map(bytes_per_device, lowered.state.values())))
    else:
        memory = Memory.of(compiled)
    seconds = time.monotonic() - traced
    if executable is not None:
        if compiled is None:
            raise AxcoreError("the program does not fit, so there is no executable to write")
        Path(executable).write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    traffic = None
    if compiled is not None:
        traffic = count_traffic(compiled.as_text() or "", _mesh(lowered), found.host_of, lowered.table)
    return _report(found, lowered, flops, 3 * forward, memory, traffic, (traced - began, seconds))


def _mesh(lowered: Lowered) -> jax.sharding.Mesh:
    assert isinstance(lowered.layout.mesh, jax.sharding.Mesh)
    return lowered.layout.mesh


def _report(
    target: Target,
    lowered: Lowered,
    flops: Flops,
    model_flops: float,
    memory: Memory,
    traffic: Traffic | None,
    seconds: Sequence[float],
) -> Report:
    count, params = target.accelerator.count, lowered.state["parameters"]
    by_dtype = {dtype: each / count for dtype, each in flops.by_dtype.items() if each}
    collectives = () if traffic is None else tuple(
        CollectiveCost(*key, traffic.calls[key], sent)
        for key, sent in sorted(traffic.sent.items(), key=lambda each: -each[1])
    )  # fmt: skip
    return Report(
        program=lowered.program,
        target=target.accelerator.text,
        device_kind=target.chip.device_kind,
        devices=count,
        hosts=target.accelerator.hosts,
        mesh=dict(lowered.layout.mesh.shape),
        tokens=lowered.tokens,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        parameters_per_device=count_per_device(params),
        state_bytes={name: bytes_per_device(tree) for name, tree in lowered.state.items()},
        memory=memory,
        limit=target.chip.limit,
        flops=by_dtype,
        uncounted=dict(flops.uncounted),
        model_flops=model_flops / count,
        memory_traffic=None if traffic is None else traffic.memory,
        collectives=collectives,
        unknown_loops=0 if traffic is None else traffic.unknown_loops,
        estimate=None if traffic is None else Estimate.of(target.chip, by_dtype, traffic, model_flops / count),
        trace_seconds=seconds[0],
        compile_seconds=seconds[1],
    )


def _collective(each: CollectiveCost) -> tuple[str, str]:
    where = ", between hosts" if each.crosses_hosts else ""
    return f"{each.kind} over {', '.join(each.axes)}", f"{_bytes(each.sent)} sent in {each.calls:,.0f} calls{where}"


def _bytes(count: float) -> str:
    return size(count, digits=2)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.3f} ms"
