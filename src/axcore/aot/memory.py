"""The memory of a compiled program on each device, against the limit of the device."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jaxtyping import PyTree

from axcore.config import OutOfMemory


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device.

    Attributes:
        arguments: bytes of the arguments of the program, such as parameters and optimizer state.
        temporaries: everything that exists only during a run.
        outputs: the results.
        donated: the part of the outputs that reuses the memory of arguments.
        peak: the largest use at any time, according to the compiler; 0 if it does not report one.
        host: like `total`, for arrays in host memory.
        total: `arguments + temporaries + outputs - donated`. If the compiler rejected the program for lack of memory,
            the figure in its message; other figures except `arguments` and `peak` are then 0.
        refused: whether the compiler rejected the program for lack of memory.
    """

    arguments: int
    temporaries: int
    outputs: int
    donated: int
    peak: int
    host: int
    total: int
    out_of_memory: bool = False

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> Memory:
        found: Any = compiled.memory_analysis()  # Any: untyped in jax

        def figures(prefix: str) -> tuple[int, int, int, int]:
            arguments, temporaries, outputs, donated = (
                int(getattr(found, f"{prefix}{name}_size_in_bytes")) for name in ("argument", "temp", "output", "alias")
            )
            return arguments, temporaries, outputs, donated

        arguments, temporaries, outputs, donated = figures("")
        host = figures("host_")
        return cls(
            arguments,
            temporaries,
            outputs,
            donated,
            getattr(found, "peak_memory_in_bytes", 0),
            host[0] + host[1] + host[2] - host[3],
            arguments + temporaries + outputs - donated,
        )

    @classmethod
    def of_out_of_memory(cls, error: OutOfMemory, arguments: int) -> Memory:
        """The figures in a compiler's error message that the program needs more memory than the device has.

        Raises:
            OutOfMemory: the message does not say how much the whole program needs.
        """
        if error.required is None or error.available is None:
            raise error
        return cls(arguments, 0, 0, 0, error.required, 0, error.required, out_of_memory=True)


def bytes_per_device(tree: PyTree) -> int:
    """The bytes of a pytree of shapes with shardings in the memory of one device."""
    return sum(math.prod(_shard(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if not _on_host(leaf))


def count_per_device(tree: PyTree) -> int:
    """The elements of a pytree of shapes with shardings on one device."""
    return sum(math.prod(_shard(leaf)) for leaf in jax.tree.leaves(tree))


def _shard(leaf: Any) -> tuple[int, ...]:  # Any: an array or its shape
    sharding = getattr(leaf, "sharding", None)
    return leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)


def _on_host(leaf: Any) -> bool:
    return "host" in (getattr(getattr(leaf, "sharding", None), "memory_kind", None) or "")
