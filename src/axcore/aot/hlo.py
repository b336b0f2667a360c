"""Parses the text of modules that XLA has compiled, as far as the cost of a program depends on it."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\](\{[^}]*\})?")
_HEAD = re.compile(r"(?:ENTRY )?%([\w.\-]+) \(")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_FAST_MEMORY = "S(1)"
"""Marks the layout of arrays in a TPU's VMEM."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        type: the type of its result, an array or a tuple.
        operands: the names of its operands, in the same computation.
        attributes: the text after the operands.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    def called(self, attribute: str) -> str | None:
        """The name of the computation in an attribute, such as `calls` or `body`."""
        found = re.search(rf"\b{attribute}=%([\w.\-]+)", self.attributes)
        return None if found is None else found[1]

    @property
    def branches(self) -> tuple[str, ...]:
        """The names of the computations of a conditional."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if listed is not None:
            return tuple(_NAME.findall(listed[1]))
        pair = (self.called("true_computation"), self.called("false_computation"))
        return tuple(name for name in pair if name is not None)


@dataclasses.dataclass(frozen=True)
class Computation:
    """A computation: its instructions by name, in order."""

    name: str
    instructions: Mapping[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        return next(each for each in self.instructions.values() if each.is_root)

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """The parameters in order."""
        found = [each for each in self.instructions.values() if each.opcode == "parameter"]
        return tuple(sorted(found, key=lambda each: int(each.attributes)))

    @functools.cached_property
    def users(self) -> Mapping[str, Sequence[Instruction]]:
        """The instructions that use each instruction."""
        found: dict[str, list[Instruction]] = {}
        for each in self.instructions.values():
            for name in dict.fromkeys(each.operands):
                found.setdefault(name, []).append(each)
        return found


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled module."""

    entry: str
    computations: Mapping[str, Computation]

    @classmethod
    def parse(cls, text: str) -> Module:
        """Parses a module.

        Args:
            text: `jax.stages.Compiled.as_text()`.
        """
        computations: dict[str, Computation] = {}
        entry, name = "", ""
        instructions: dict[str, Instruction] = {}
        for line in text.splitlines():
            if line.startswith("}"):
                computations[name] = Computation(name, instructions)
            elif line[:1] in "%E" and (head := _HEAD.match(line)) is not None:
                name, instructions = head[1], {}
                entry = name if line.startswith("ENTRY") else entry
            elif (found := _INSTRUCTION.match(line)) is not None:
                read = _instruction(found[2], line[found.end() :], found[1] is not None)
                instructions[read.name] = read
        return cls(entry, computations)

    def trip_count(self, loop: Instruction) -> int | None:
        """The number of iterations of a `while` instruction; None if it is not known.

        Modules for TPUs do not state it, but the condition of a scan compares with a constant.
        """
        if (known := _TRIPS.search(loop.attributes)) is not None:
            return int(known[1])
        condition = self.computations[loop.called("condition") or ""]
        bounds = [
            int(each.attributes)
            for each in condition.instructions.values()
            if each.opcode == "constant" and each.attributes.isdigit()
        ]
        return bounds[0] if len(bounds) == 1 and "direction=LT" in condition.root.attributes else None


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    opcode, _, rest = text[end:].strip().partition("(")
    close = _closing("(" + rest)
    inside, after = rest[: close - 1], rest[close:]
    if opcode in ("parameter", "constant"):
        return Instruction(name, text[:end], opcode, (), inside, is_root)
    return Instruction(name, text[:end], opcode, tuple(_NAME.findall(inside)), after, is_root)


def _closing(text: str) -> int:
    """The index of the parenthesis that closes the first one."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text)


def size(type_: str, *, slow_only: bool = False) -> int:
    """The bytes of an array type, or of all arrays in a tuple type.

    Args:
        slow_only: leave out arrays in a TPU's VMEM.
    """
    return sum(math.ceil(count * bits / 8) for count, bits in _arrays(type_, slow_only))


def _arrays(type_: str, slow_only: bool) -> Iterator[tuple[int, float]]:
    for dtype, dims, layout in _ARRAY.findall(type_):
        if not (slow_only and _FAST_MEMORY in layout):
            yield math.prod(int(dim) for dim in dims.split(",") if dim), _bits(dtype)


def _bits(dtype: str) -> int:
    """The bits of an element: `bf16`, `f8e4m3fn`, `s4`, `pred`, `token`."""
    if dtype in ("pred", "token", "opaque"):
        return 8 if dtype == "pred" else 0
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 0
