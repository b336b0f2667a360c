"""The bytes that a compiled program moves on each device: to and from memory, and to other devices."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from axcore.aot.hlo import Computation, Instruction, Module, size
from axcore.parallel.pipeline import Op, Table

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "ragged-all-to-all", "all-to-all", "collective-permute")
_NO_TRAFFIC = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id")
_PRODUCTS = ("dot", "convolution", "custom-call")
_PASS_THROUGH = ("bitcast", "convert", "copy", "reshape", "transpose")
"""Operations that a fusion computes only for the elements that it uses later."""


class Collective(NamedTuple):
    """Collectives of one kind over the same mesh axes.

    Attributes:
        axes: the mesh axes that the groups span.
        crosses_hosts: whether the groups span several hosts, or slices of a TPU.
        members_per_host: the number of members of a group on one host, which together send their data to the next host
            only once in a ring.
    """

    kind: str
    axes: tuple[str, ...]
    crosses_hosts: bool
    members_per_host: int


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The bytes that one run of a program moves on each device.

    Attributes:
        memory: bytes read from and written to memory.
        elementwise: the part of `memory` due to instructions without a matrix product or an opaque call.
        sent: bytes sent to other devices, for each kind of collective. A ring is assumed: an all-gather of b bytes over
            n devices sends b (n-1)/n, an all-reduce twice that.
        calls: the number of collectives.
        unknown_loops: the number of loops whose number of iterations is not known. Their bodies are counted once.
    """

    memory: float = 0.0
    elementwise: float = 0.0
    sent: Mapping[Collective, float] = dataclasses.field(default_factory=dict)
    calls: Mapping[Collective, float] = dataclasses.field(default_factory=dict)
    unknown_loops: int = 0

    def plus(self, other: Traffic, times: float = 1) -> Traffic:
        def added(one: Mapping[Collective, float], two: Mapping[Collective, float]) -> Mapping[Collective, float]:
            return {key: one.get(key, 0) + times * two.get(key, 0) for key in {**one, **two}}

        return Traffic(
            self.memory + times * other.memory,
            self.elementwise + times * other.elementwise,
            added(self.sent, other.sent),
            added(self.calls, other.calls),
            self.unknown_loops + other.unknown_loops,
        )


def count_traffic(
    text: str, mesh: jax.sharding.Mesh, host_of: Callable[[jax.Device], int], table: Table | None = None
) -> Traffic:
    """The traffic of a compiled program. A conditional is counted as the branch with the most memory traffic.

    Args:
        text: `jax.stages.Compiled.as_text()`.
        host_of: the host of a device, or the slice of a TPU.
        table: the schedule of the pipeline stages; None without stages. Each tick is counted as the operation with the
            most memory traffic that a stage runs in it.
    """
    module = Module.parse(text)
    groups = _Groups(mesh, np.array([host_of(device) for device in mesh.devices.flat]))
    return _Reader(module, groups, table).traffic(module.entry)


class _Reader:
    def __init__(self, module: Module, groups: _Groups, table: Table | None):
        self._module, self._groups, self._table = module, groups, table
        self.traffic = functools.cache(self._traffic)

    def _traffic(self, name: str) -> Traffic:
        """The traffic of one run of a computation."""
        computation, total = self._module.computations[name], Traffic()
        for each in computation.instructions.values():
            total = total.plus(self._one(computation, each))
        return total

    def _one(self, computation: Computation, each: Instruction) -> Traffic:
        match each.opcode:
            case "while":
                trip_count, body = self._module.trip_count(each), each.called("body") or ""
                if self._table is not None and trip_count == self._table.ticks:
                    return self._ticks(self._table, self._module.computations[body])
                loop = Traffic(unknown_loops=int(trip_count is None))
                return loop.plus(self.traffic(body), 1 if trip_count is None else trip_count)
            case "conditional":
                return max((self.traffic(name) for name in each.branches), key=lambda found: found.memory)
            case "call" | "async-start":
                return self.traffic(each.called("to_apply") or each.called("calls") or "")
        memory = self._memory(computation, each)
        own = Traffic(memory=memory, elementwise=0 if self._is_product(each) else memory)
        if (kind := _collective(each.opcode)) is not None:
            return own.plus(self._sent(computation, each, kind))
        if each.opcode in ("fusion", "fusion-start") and (fused := each.called("calls")) is not None:
            return own.plus(self._fused(self._module.computations[fused]))
        return own

    def _ticks(self, table: Table, body: Computation) -> Traffic:
        """All iterations of a loop that runs as often as a schedule has ticks."""
        total = Traffic()
        for each in body.instructions.values():
            if each.opcode == "conditional" and len(each.branches) == len(Op):
                found = [self.traffic(name) for name in each.branches]
                for ops, count in table.together.items():
                    total = total.plus(max((found[op] for op in ops), key=lambda one: one.memory), count)
            else:
                total = total.plus(self._one(body, each), table.ticks)
        return total

    def _is_product(self, each: Instruction) -> bool:
        if each.opcode in ("fusion", "fusion-start"):
            fused = self._module.computations[each.called("calls") or ""]
            return any(one.opcode in _PRODUCTS for one in fused.instructions.values())
        return each.opcode in _PRODUCTS

    def _fused(self, computation: Computation) -> Traffic:
        """The collectives in a fusion. On TPUs, a reduce-scatter is an all-reduce in a fusion with its name."""
        total = Traffic()
        for each in computation.instructions.values():
            if (kind := _collective(each.opcode)) is not None:
                if computation.name.startswith("all-reduce-scatter"):
                    kind = "reduce-scatter of an all-reduce"
                total = total.plus(self._sent(computation, each, kind))
        return total

    def _sent(self, computation: Computation, each: Instruction, kind: str) -> Traffic:
        start = computation.instructions[each.operands[0]] if each.opcode.endswith("-done") else each
        members, axes, crosses_hosts, members_per_host = self._groups.of(start.attributes)
        payload, share = float(size(each.type)), (members - 1) / members
        match kind:
            case "reduce-scatter":
                sent = payload * (members - 1)
            case "all-reduce":
                sent = 2 * share * payload
            case "collective-permute":
                sent = payload
            case _:
                sent = share * payload
        key = Collective(kind.partition(" ")[0], axes, crosses_hosts, members_per_host)
        # A group of one device sends nothing.
        return Traffic(sent={key: sent}, calls={key: 1}) if axes else Traffic()

    def _memory(self, computation: Computation, each: Instruction) -> int:
        """The bytes that an instruction outside of fusions reads and writes."""
        if each.opcode in _NO_TRAFFIC:
            return 0
        if each.opcode == "async-done":  # counted where it starts
            return 0
        if each.opcode == "fusion-done":
            start = computation.instructions[each.operands[0]]
            fused = self._module.computations[start.called("calls") or ""]
            return _written(fused, fused.root)
        if each.opcode.endswith("-done"):
            return size(each.type, slow_only=True)
        operands = [computation.instructions[name].type for name in each.operands]
        read = sum(size(operand, slow_only=True) for operand in operands)
        written = 0 if each.opcode.endswith("-start") else size(each.type, slow_only=True)
        match each.opcode:
            case "dynamic-slice" | "slice" | "gather":
                return 2 * written
            case "dynamic-update-slice":
                return 2 * size(operands[1], slow_only=True)
            case "scatter":
                return 3 * size(operands[-1], slow_only=True)
            case "fusion" | "fusion-start" if (name := each.called("calls")) in self._module.computations:
                fused = self._module.computations[name or ""]
                read = sum(min(_read(fused, one), size(operand, slow_only=True)) for one, operand in zip(
                    fused.parameters, operands, strict=False))  # fmt: skip
                return read + (_written(fused, fused.root) if written else 0)
            case _:
                return read + written


def _collective(opcode: str) -> str | None:
    """The kind of collective that an instruction completes."""
    kind = opcode.removesuffix("-done")
    return kind if kind in KINDS else None


def _read(fused: Computation, value: Instruction) -> int:
    """The bytes of a value that a fusion uses."""
    total = 0
    for user in fused.users.get(value.name, ()):
        if user.opcode in _PASS_THROUGH:
            total += _read(fused, user)
        elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == value.name:
            total += size(user.type)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            continue  # updated in place
        else:
            return size(value.type)
    return min(total, size(value.type))


def _written(fused: Computation, root: Instruction) -> int:
    """The bytes that a fusion writes. If it updates an array in place, these are the bytes of the update."""
    if root.opcode == "tuple":
        return sum(_written(fused, fused.instructions[name]) for name in root.operands)
    last = root
    while last.opcode in _PASS_THROUGH:
        last = fused.instructions[last.operands[0]]
    if last.opcode == "dynamic-update-slice":
        return size(fused.instructions[last.operands[1]].type)
    return size(root.type, slow_only=True)


class _Groups:
    """The mesh axes of groups of devices. Parses the notations that XLA uses for groups."""

    def __init__(self, mesh: jax.sharding.Mesh, hosts: np.ndarray):
        self._names, self._shape, self._hosts = mesh.axis_names, mesh.devices.shape, hosts
        self.of = functools.cache(self._of)

    def _of(self, attributes: str) -> tuple[int, tuple[str, ...], bool, int]:
        """(size of a group, mesh axes, whether a group spans hosts, members of a group on one host)."""
        groups = list(self._read(attributes))
        spans = [len(set(self._hosts[group])) for group in groups]
        axes: set[int] = set()
        for group in groups:
            coordinates = np.array(np.unravel_index(group, self._shape))
            axes.update(np.flatnonzero((coordinates != coordinates[:, :1]).any(axis=1)).tolist())
        members, hosts = len(groups[0]), max(spans)
        return members, tuple(self._names[axis] for axis in sorted(axes)), hosts > 1, max(members // hosts, 1)

    def _read(self, attributes: str) -> Iterator[list[int]]:
        count = int(np.prod(self._shape))
        if (pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)) is not None:
            yield from ([int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1]))
        elif named := re.search(r"replica_groups=mesh\[([^\]]*)\](?:,device_ids=\S+)? ?\{([^}]*)\}", attributes):
            sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
            used = re.findall(r"'([^']+)'", named[2])
            yield from _along(np.arange(count).reshape([*sizes.values()]), [list(sizes).index(name) for name in used])
        elif iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
            ids = np.arange(count).reshape(_ints(iota[3]))
            ids = ids.transpose(_ints(iota[4])) if iota[4] else ids
            yield from ids.reshape(int(iota[1]), int(iota[2])).tolist()
        elif (listed := re.search(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}", attributes)) is not None:
            yield from (_ints(group) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
        else:  # all devices
            yield list(range(count))


def _along(ids: np.ndarray, axes: Sequence[int]) -> Iterator[list[int]]:
    last = list(range(ids.ndim - len(axes), ids.ndim))
    members = int(np.prod([ids.shape[axis] for axis in axes]))
    yield from np.moveaxis(ids, axes, last).reshape(-1, members).tolist()


def _ints(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]
