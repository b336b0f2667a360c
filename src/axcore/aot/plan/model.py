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
from axcore.config import ConfigError, FrozenDict, walk
from axcore.nn import Stack, use_remat, use_unroll
from axcore.parallel import MESH_AXES, Remat
from axcore.train import Trainer
from axcore.train.data.form import batch_form
from axcore.train.step.program import Program, program

_PRIMES = (13, 17, 19, 23, 29, 31, 37, 41)
_SHARDING = ("fsdp", "expert", "context")
"""Axes over which parameters are sharded and gathered; experts over the others than `expert`."""

_HOST = 57e9
"""Bytes/s between a device and its host, measured with offloaded optimizer state on one H200."""

_CHOICES = 2
"""Experts that a token is sent to."""

_PASSES, _GATHERS = 2.1, 7.0
"""Bytes that elementwise operations read and write for each byte of activations, and for each byte of gathered
weights. Fitted on three compiled steps of Llama models for H100s."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run a step.

    Attributes:
        shape: the size of each mesh axis.
        remat: the policy of every stack; None: the backward pass recomputes nothing.
        unroll: whether the loops over layers are unrolled.
        offload: whether the optimizer state is in host memory between steps.
    """

    shape: Mapping[str, int]
    remat: Remat | None
    microbatches: int
    unroll: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", FrozenDict(self.shape))  # so that candidates are hashable

    def applied(self, cfg: Trainer.Config) -> Trainer.Config:
        """The config that runs this way. The outermost axes of the mesh span the hosts."""
        mesh = cfg.mesh.set(shape=dict(self.shape), dcn={}, optimizer_memory="host" if self.offload else "device")
        model = use_unroll(use_remat(cfg.model, self.remat), self.unroll)
        return cfg.set(mesh=mesh, model=model, microbatches=self.microbatches)

    @property
    def program(self) -> tuple[Remat | None, bool, bool]:
        """What decides the operations of a step, apart from the mesh and the batch."""
        return self.remat, self.unroll, self.offload

    @property
    def rows_over(self) -> int:
        """The number of shards of the rows of a batch."""
        return math.prod(self.shape.get(axis, 1) for axis in ("data", "fsdp", "expert"))


class BatchNotDivisible(ConfigError):
    """The rows or the tokens of a batch cannot be split as a candidate asks."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the model says of a candidate. Bytes of one device, seconds of one step.

    Attributes:
        state: bytes of the training state.
        total: bytes of the state and of temporaries.
        compute: matrix products.
        memory: everything else that a device does.
        exposed: communication that a device waits for: of activations over the axes tensor, expert and context.
        host: transfers of the optimizer state from and to host memory.
        link, network: communication that overlaps with the work of the device.
    """

    state: float
    total: float
    compute: float
    memory: float
    exposed: float
    host: float
    link: float
    network: float
    mfu: float

    @property
    def temporaries(self) -> float:
        """Bytes of everything but the state."""
        return self.total - self.state

    @property
    def step(self) -> float:
        return max(sum(self._parts.values()), self.link, self.network)

    @property
    def slowest(self) -> str:
        """The resource that bounds the step."""
        if max(self.link, self.network) >= sum(self._parts.values()):
            return "link" if self.link >= self.network else "network"
        return max(self._parts, key=lambda name: self._parts[name])

    @property
    def _parts(self) -> dict[str, float]:
        return {
            "compute": self.compute,
            "memory": self.memory,
            "exchanged activations": self.exposed,
            "host memory": self.host,
        }


@dataclasses.dataclass(frozen=True)
class _Trace:
    """One training step on one device, with a prime number of rows."""

    jaxpr: ClosedJaxpr
    rows: int
    flops: Mapping[str, float]


class Model:
    """Figures of one config on one target. Traces the step once for each way to run the layers.

    Attributes:
        experts: the number of experts of each mixture; 0 without mixtures.
    """

    def __init__(self, cfg: Trainer.Config, target: Target):
        self._cfg, self._target = cfg, target
        self._found: dict[Candidate, Figures] = {}
        self._batch, self._seq = batch_form(cfg.input)["inputs"].shape
        self._traces: dict[tuple[Remat | None, bool, bool], _Trace] = {}
        self._states: dict[tuple[tuple[tuple[str, int], ...], bool], tuple[int, int]] = {}
        one = self._program(Candidate({"data": 1}, None, 1).applied(cfg), 1)
        params = jax.tree.leaves(one.state.params)
        self._parameters = sum(leaf.size for leaf in params)
        axes = jax.tree.leaves(one.fn.axes, is_leaf=lambda node: isinstance(node, tuple))
        experts = [(leaf, names) for leaf, names in zip(params, axes, strict=True) if "expert" in names]
        self.experts = math.gcd(*(leaf.shape[names.index("expert")] for leaf, names in experts))
        self._in_experts = sum(leaf.size for leaf, _ in experts)
        layers = (
            (leaf.shape[names.index("layer")] if "layer" in names else 1)
            for leaf, names in zip(params, axes, strict=True)
        )
        self._counts = frozenset(
            size for leaf, count in zip(params, layers, strict=True) for size in (leaf.size, leaf.size // count)
        )
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
            BatchNotDivisible: the batch cannot be split this way.
            ConfigError: a parameter cannot.
        """
        if candidate not in self._found:
            self._found[candidate] = self._compute(candidate)
        return self._found[candidate]

    def _compute(self, candidate: Candidate) -> Figures:
        rows = self._batch / candidate.rows_over / candidate.microbatches
        if rows % 1:
            raise BatchNotDivisible(
                f"{self._batch} rows cannot be split over {candidate.rows_over} devices and {candidate.microbatches} "
                f"microbatches"
            )
        context, tensor = (candidate.shape.get(axis, 1) for axis in ("context", "tensor"))
        if self._seq % context:
            raise BatchNotDivisible(f"rows of {self._seq} tokens cannot be split over {context} devices")
        arguments, held = self._state(candidate)
        trace, dim = self._trace(candidate), getattr(self._cfg.model, "dim", 0)
        sizes = Sizes(trace.rows, rows / context, held / self._parameters, tensor, dim, self._counts)
        accumulated = 4 * held if candidate.microbatches > 1 else 0
        total = arguments + temporaries(trace.jaxpr, sizes) + accumulated
        return self._figures(candidate, trace, sizes, total, arguments)

    def _figures(self, candidate: Candidate, trace: _Trace, sizes: Sizes, total: float, arguments: int) -> Figures:
        chip, count, steps = self._target.chip, self._target.accelerator.count, candidate.microbatches
        share = self._batch / trace.rows / count
        compute = sum(flops * share / _peak(chip, dtype) for dtype, flops in trace.flops.items())
        is_gathered = math.prod(candidate.shape.get(axis, 1) for axis in _SHARDING) > 1
        gathered = _GATHERS * sum(weights for weights, _ in self._weights(candidate)) if is_gathered else 0.0
        on_device, _ = self._state(dataclasses.replace(candidate, offload=False))
        memory = (steps * (_PASSES * traffic(trace.jaxpr, sizes) + gathered) + 2 * on_device) / chip.bandwidth
        near, far, exposed = self._communication(candidate, sizes)
        mfu_at_one_second = self._model_flops * self._batch / count / _peak(chip, max(trace.flops, key=trace.flops.get))  # type: ignore[arg-type]
        found = Figures(
            arguments,
            total,
            compute / USUAL.compute,
            memory / USUAL.memory,
            exposed / chip.link / USUAL.link,
            2 * (on_device - arguments) / _HOST,
            near / chip.link / USUAL.link,
            far / chip.network / USUAL.link,
            0.0,
        )
        return dataclasses.replace(found, mfu=mfu_at_one_second / found.step)

    def _communication(self, candidate: Candidate, sizes: Sizes) -> tuple[float, float, float]:
        """Bytes that each device sends: over links, over the network, and of activations."""
        shape, steps = candidate.shape, candidate.microbatches
        shards = math.prod(shape.get(axis, 1) for axis in _SHARDING)
        tensor, expert, context = (shape.get(axis, 1) for axis in ("tensor", "expert", "context"))
        copies = shape.get("data", 1)
        near = far = 0.0
        weights = self._weights(candidate)
        gathers = 3 * steps * sum(each * (size - 1) / size for each, size in weights)  # twice, and gradients scattered
        reduces = 2 * steps * sum(each / size for each, size in weights) * (copies - 1) / copies
        inner = tensor
        for sent, size in ((gathers, shards), (reduces, copies)):
            together = min(max(self._target.accelerator.per_host // inner, 1), size)
            near += sent if together > 1 else 0.0
            far += sent / together if together < size else 0.0
            inner *= size
        stream = 2 * sizes.per_device * self._seq * sizes.dim
        # Each layer reduces the stream twice over `tensor`, in both passes. Mixtures send the rows of each token to its
        # experts and back, and attention gathers keys and values, counted as two streams.
        once = 4 * 2 * (tensor - 1) / tensor + 4 * _CHOICES * (expert - 1) / expert + 2 * 2 * (context - 1)
        return near, far, self._layers * steps * once * stream

    def _weights(self, candidate: Candidate) -> tuple[tuple[float, int], ...]:
        """(bytes that a device reads of gathered parameters in bfloat16, devices that share them): experts last."""
        fsdp, expert, context, tensor = (candidate.shape.get(axis, 1) for axis in (*_SHARDING, "tensor"))
        dense = 2 * (self._parameters - self._in_experts) / tensor
        return (dense, fsdp * expert * context), (2 * self._in_experts / tensor / expert, fsdp * context)

    def _state(self, candidate: Candidate) -> tuple[int, int]:
        """(bytes of the state on one device, parameters on one device)."""
        shape = tuple(sorted(candidate.shape.items(), key=lambda each: MESH_AXES.index(each[0])))
        if (key := (shape, candidate.offload)) not in self._states:
            cfg = dataclasses.replace(candidate, microbatches=1).applied(self._cfg)
            state = self._program(cfg, self._target.accelerator.count).state
            self._states[key] = bytes_per_device(state), count_per_device(state.params)
        return self._states[key]

    def _trace(self, candidate: Candidate) -> _Trace:
        if (key := candidate.program) not in self._traces:
            one = dataclasses.replace(candidate, shape={"data": 1}, microbatches=1).applied(self._cfg)
            one = one.set(input=one.input.set(batch_size=self._rows))
            jaxpr = self._program(one, 1).trace_train(batch_form(one.input)).jaxpr
            self._traces[key] = _Trace(jaxpr, self._rows, count_flops(jaxpr).by_dtype)
        return self._traces[key]


def _peak(chip: Chip, dtype: str) -> float:
    return chip.peak.get(dtype, chip.peak["bfloat16"])
