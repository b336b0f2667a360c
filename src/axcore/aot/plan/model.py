"""The memory and the time of a training step by formulas, for any mesh, remat policy and number of microbatches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
from jax.extend.core import ClosedJaxpr

from axcore.aot.chips import Chip
from axcore.aot.flops import count_flops
from axcore.aot.memory import bytes_per_device, count_per_device
from axcore.aot.plan.liveness import Sizes, temporaries, traffic
from axcore.aot.roofline import USUAL
from axcore.aot.targets import Target
from axcore.config import ConfigError, walk
from axcore.nn import Stack, use_remat
from axcore.parallel import MESH_AXES, Mesh, Remat
from axcore.train import Trainer
from axcore.train.data.form import batch_form
from axcore.train.step.program import Program, program

_PRIMES = (13, 17, 19, 23, 29, 31, 37, 41)
_SHARDING = ("fsdp", "expert", "context")
"""Axes over which parameters are sharded and gathered."""

_PASSES, _GATHERS = 2.1, 7.0
"""Bytes that elementwise operations read and write for each byte of activations, and for each byte of gathered
weights. Fitted on three compiled steps of Llama models for H100s."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run a step.

    Attributes:
        shape: the size of each mesh axis.
        remat: the policy of every stack; None: the backward pass recomputes nothing.
    """

    shape: Mapping[str, int]
    remat: Remat | None
    microbatches: int

    def applied(self, cfg: Trainer.Config) -> Trainer.Config:
        """The config that runs this way."""
        model = use_remat(cfg.model, self.remat)
        return cfg.set(mesh=_mesh(cfg, self.shape), model=model, microbatches=self.microbatches)

    @property
    def rows_over(self) -> int:
        """The number of shards of the rows of a batch."""
        return math.prod(self.shape.get(axis, 1) for axis in ("data", "fsdp", "expert"))


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the model says of a candidate. Bytes of one device, seconds of one step.

    Attributes:
        state: bytes of the training state.
        total: bytes of the state and of temporaries.
        compute: matrix products.
        memory: everything else that a device does.
        exposed: communication that a device waits for: of the tensor axis.
        link, network: communication that overlaps with the work of the device.
    """

    state: float
    total: float
    compute: float
    memory: float
    exposed: float
    link: float
    network: float
    mfu: float

    @property
    def step(self) -> float:
        return max(self.compute + self.memory + self.exposed, self.link, self.network)

    @property
    def slowest(self) -> str:
        """The resource that bounds the step."""
        parts = {"compute": self.compute, "memory": self.memory, "tensor parallelism": self.exposed}
        if max(self.link, self.network) >= self.compute + self.memory + self.exposed:
            return "link" if self.link >= self.network else "network"
        return max(parts, key=lambda name: parts[name])


@dataclasses.dataclass(frozen=True)
class _Trace:
    """One training step on one device, with a prime number of rows."""

    jaxpr: ClosedJaxpr
    rows: int
    flops: Mapping[str, float]


class Model:
    """Figures of one config on one target. Traces the step once for each remat policy."""

    def __init__(self, cfg: Trainer.Config, target: Target):
        self._cfg, self._target = cfg, target
        self._batch, self._seq = batch_form(cfg.input)["inputs"].shape
        self._traces: dict[Remat | None, _Trace] = {}
        self._states: dict[tuple[tuple[str, int], ...], tuple[int, int]] = {}
        one = self._program(cfg.set(mesh=_mesh(cfg, {"data": 1}), microbatches=1), 1)
        params = jax.tree.leaves(one.state.params)
        self._parameters = sum(leaf.size for leaf in params)
        used = {size for leaf in params for size in leaf.shape} | {self._seq}
        self._rows = next(prime for prime in _PRIMES if all(size % prime for size in used))
        rows = cfg.input.set(batch_size=self._rows)
        forward = jax.jit(one.eval_step).trace(one.state.params, one.state.model_state, batch_form(rows))
        self._model_flops = 3 * count_flops(forward.jaxpr).total / self._rows
        stacks = [len(node.places()) for _, node in walk(cfg.model) if isinstance(node, Stack.Config)]
        self._layers = max(stacks, default=1)

    def _program(self, cfg: Trainer.Config, count: int) -> Program:
        chip = self._target.chip
        layout = cfg.mesh.abstract(count, chip.platform, chip.device_kind)
        return program(cfg.model, cfg.learner, layout, cfg.objective, cfg.microbatches)

    def figures(self, candidate: Candidate) -> Figures:
        """
        Raises:
            ConfigError: the batch or a parameter cannot be split this way.
        """
        rows = self._batch / candidate.rows_over / candidate.microbatches
        if rows % 1:
            raise ConfigError(
                f"{self._batch} rows cannot be split over {candidate.rows_over} devices and {candidate.microbatches} "
                f"microbatches"
            )
        arguments, held = self._state(candidate)
        trace, tensor = self._trace(candidate.remat), candidate.shape.get("tensor", 1)
        dim = getattr(self._cfg.model, "dim", 0)
        context = candidate.shape.get("context", 1)
        sizes = Sizes(trace.rows, rows / context, held / self._parameters, tensor, dim)
        accumulated = 4 * held if candidate.microbatches > 1 else 0
        total = arguments + temporaries(trace.jaxpr, sizes) + accumulated
        return self._figures(candidate, trace, sizes, total, arguments)

    def _figures(self, candidate: Candidate, trace: _Trace, sizes: Sizes, total: float, arguments: int) -> Figures:
        chip, count, steps = self._target.chip, self._target.accelerator.count, candidate.microbatches
        share = self._batch / trace.rows / count
        compute = sum(flops * share / _peak(chip, dtype) for dtype, flops in trace.flops.items())
        is_gathered = math.prod(candidate.shape.get(axis, 1) for axis in _SHARDING) > 1
        gathered = _GATHERS * self._weights(candidate) if is_gathered else 0.0
        memory = (steps * (_PASSES * traffic(trace.jaxpr, sizes) + gathered) + 2 * arguments) / chip.bandwidth
        near, far, exposed = self._communication(candidate, sizes)
        mfu_at_one_second = self._model_flops * self._batch / count / _peak(chip, max(trace.flops, key=trace.flops.get))  # type: ignore[arg-type]
        found = Figures(
            arguments,
            total,
            compute / USUAL.compute,
            memory / USUAL.memory,
            exposed / chip.link / USUAL.link,
            near / chip.link / USUAL.link,
            far / chip.network / USUAL.link,
            0.0,
        )
        return dataclasses.replace(found, mfu=mfu_at_one_second / found.step)

    def _communication(self, candidate: Candidate, sizes: Sizes) -> tuple[float, float, float]:
        """Bytes that each device sends: over links, over the network, and for the tensor axis."""
        shape, steps = candidate.shape, candidate.microbatches
        shards = math.prod(shape.get(axis, 1) for axis in _SHARDING)
        tensor, copies = shape.get("tensor", 1), shape.get("data", 1)
        weights = self._weights(candidate)
        near = far = 0.0
        gathers = 3 * steps * weights * (shards - 1) / shards  # twice gathered, and the gradients scattered
        reduces = 2 * steps * weights / shards * (copies - 1) / copies
        inner = tensor
        for sent, size in ((gathers, shards), (reduces, copies)):
            together = min(max(self._target.accelerator.per_host // inner, 1), size)
            near += sent if together > 1 else 0.0
            far += sent / together if together < size else 0.0
            inner *= size
        stream = 2 * sizes.per_device * self._seq * sizes.dim
        exposed = 4 * self._layers * steps * 2 * (tensor - 1) / tensor * stream
        return near, far, exposed

    def _weights(self, candidate: Candidate) -> float:
        """The bytes of the parameters of one data-parallel replica in bfloat16, as the products read them."""
        return 2 * self._parameters / candidate.shape.get("tensor", 1)

    def _state(self, candidate: Candidate) -> tuple[int, int]:
        """(bytes of the state on one device, parameters on one device)."""
        key = tuple(sorted(candidate.shape.items(), key=lambda each: MESH_AXES.index(each[0])))
        if key not in self._states:
            cfg = self._cfg.set(mesh=_mesh(self._cfg, candidate.shape), microbatches=1)
            state = self._program(cfg, self._target.accelerator.count).state
            self._states[key] = bytes_per_device(state), count_per_device(state.params)
        return self._states[key]

    def _trace(self, remat: Remat | None) -> _Trace:
        if remat not in self._traces:
            one = Candidate({"data": 1}, remat, 1).applied(self._cfg)
            one = one.set(input=one.input.set(batch_size=self._rows))
            jaxpr = self._program(one, 1).trace_train(batch_form(one.input)).jaxpr
            self._traces[remat] = _Trace(jaxpr, self._rows, count_flops(jaxpr).by_dtype)
        return self._traces[remat]


def _mesh(cfg: Trainer.Config, shape: Mapping[str, int]) -> Mesh:
    """The mesh of this shape, whose outermost axes span the hosts."""
    return cfg.mesh.set(shape=dict(shape), dcn={})


def _peak(chip: Chip, dtype: str) -> float:
    return chip.peak.get(dtype, chip.peak["bfloat16"])
