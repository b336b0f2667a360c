"""Conversions between tensors of a checkpoint and parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from axcore.config import AxcoreError

Array = np.ndarray[Any, np.dtype[Any]]
Shapes = Sequence[tuple[int, ...]]


class Transform:
    """Base class. Converts tensors of a checkpoint ("theirs") to parameters of a model ("ours"), and back."""

    def read(self, theirs: Sequence[Array], shapes: Shapes) -> list[Array]:
        """Converts their tensors to our parameters.

        Args:
            shapes: the required shapes of our parameters.
        """
        raise NotImplementedError

    def pieces(
        self, get: Callable[[str], Array], theirs: Sequence[str], shapes: Shapes
    ) -> Iterator[tuple[int, tuple[int, ...], Array]]:
        """Yields our parameters in pieces, to limit memory.

        Args:
            get: reads one of their tensors.
            theirs: names of their tensors.

        Yields:
            (number of the parameter, index into its leading axes, array at this index).
        """
        for number, part in enumerate(self.read([get(name) for name in theirs], shapes)):
            yield number, (), part

    def write(self, ours: Sequence[Array]) -> list[Array]:
        """Their tensors."""
        raise NotImplementedError

    def expected(self, shapes: Shapes) -> list[tuple[int, ...]]:
        """The shapes of their tensors, given the shapes of our parameters."""
        ours = [np.broadcast_to(np.zeros((), np.int8), shape) for shape in shapes]
        return [each.shape for each in self.write(ours)]


class Plain(Transform):
    """The identity."""

    def read(self, theirs: Sequence[Array], shapes: Shapes) -> list[Array]:
        return list(theirs)

    def write(self, ours: Sequence[Array]) -> list[Array]:
        return list(ours)


class Tied(Transform):
    """Two copies of one matrix, of which only one is kept."""

    def read(self, theirs: Sequence[Array], shapes: Shapes) -> list[Array]:
        first, second = theirs
        if not np.array_equal(first, second):
            raise AxcoreError(
                "tie_word_embeddings is true, but the embedding and the head in the checkpoint differ. Set it to false "
                "in config.json to use both."
            )
        return [first]

    def write(self, ours: Sequence[Array]) -> list[Array]:
        return [*ours, *ours]


class Transposed(Transform):
    """[out, in] <-> [in, out]."""

    def read(self, theirs: Sequence[Array], shapes: Shapes) -> list[Array]:
        return [each.swapaxes(-1, -2) for each in theirs]

    def write(self, ours: Sequence[Array]) -> list[Array]:
        return [each.swapaxes(-1, -2) for each in ours]


@dataclasses.dataclass(frozen=True)
class Fused(Transform):
    """One of their tensors is the concatenation of several of ours along the output dimension.

    Attributes:
        transposed: whether their tensor is [out, in].
    """

    transposed: bool = True

    def read(self, theirs: Sequence[Array], shapes: Shapes) -> list[Array]:
        (whole,) = theirs
        whole = whole.swapaxes(-1, -2) if self.transposed and whole.ndim > 1 else whole
        ends = np.cumsum([shape[-1] for shape in shapes])[:-1]
        return np.split(whole, ends, axis=-1)

    def write(self, ours: Sequence[Array]) -> list[Array]:
        whole = np.concatenate(ours, axis=-1)
        return [whole.swapaxes(-1, -2) if self.transposed and whole.ndim > 1 else whole]


@dataclasses.dataclass(frozen=True)
class ByHead(Transform):
    """One of their tensors [heads * features, in], or the bias [heads * features], contains, head by head, the features
    of several of ours [in, heads * features]."""

    heads: int

    def read(self, theirs: Sequence[Array], shapes: Shapes) -> list[Array]:
        (whole,) = theirs
        by_head = whole.reshape(self.heads, -1, *whole.shape[1:])
        ends = np.cumsum([shape[-1] // self.heads for shape in shapes])[:-1]
        return [each.reshape(-1, *whole.shape[1:]).T for each in np.split(by_head, ends, axis=1)]

    def write(self, ours: Sequence[Array]) -> list[Array]:
        parts = [each.T.reshape(self.heads, -1, *each.shape[:-1]) for each in ours]
        whole = np.concatenate(parts, axis=1)
        return [whole.reshape(-1, *whole.shape[2:])]


@dataclasses.dataclass(frozen=True)
class Rows(Transform):
    """Their tensor [rows, features] <-> one of ours, [rows * features]."""

    rows: int

    def read(self, theirs: Sequence[Array], shapes: Shapes) -> list[Array]:
        return [each.reshape(-1) for each in theirs]

    def write(self, ours: Sequence[Array]) -> list[Array]:
        return [each.reshape(self.rows, -1) for each in ours]


@dataclasses.dataclass(frozen=True)
class Joined(Transform):
    """`parts` tensors of theirs [features] <-> one of ours, [parts * features]."""

    parts: int

    def read(self, theirs: Sequence[Array], shapes: Shapes) -> list[Array]:
        return [np.concatenate(theirs)]

    def write(self, ours: Sequence[Array]) -> list[Array]:
        (whole,) = ours
        return np.split(whole, self.parts)


class Interleaved(Transform):
    """One of their tensors interleaves the features of two of ours along its last dimension."""

    def read(self, theirs: Sequence[Array], shapes: Shapes) -> list[Array]:
        (whole,) = theirs
        return [whole[..., ::2], whole[..., 1::2]]

    def write(self, ours: Sequence[Array]) -> list[Array]:
        whole = np.stack(ours, axis=-1)
        return [whole.reshape(*whole.shape[:-2], -1)]


class Stacked(Transform):
    """Their tensors [out, in], one per expert <-> one of ours, [expert, in, out]."""

    def pieces(
        self, get: Callable[[str], Array], theirs: Sequence[str], shapes: Shapes
    ) -> Iterator[tuple[int, tuple[int, ...], Array]]:
        for expert, name in enumerate(theirs):
            yield 0, (expert,), get(name).T

    def write(self, ours: Sequence[Array]) -> list[Array]:
        (whole,) = ours
        return [each.T for each in whole]


@dataclasses.dataclass(frozen=True)
class InterleavedRope(Transform):
    """[heads * head_dim, in] with rows ordered for interleaved RoPE, as in llama.cpp <-> [in, heads * head_dim] for
    RoPE in halves."""

    heads: int

    def read(self, theirs: Sequence[Array], shapes: Shapes) -> list[Array]:
        (whole,) = theirs
        by_head = whole.reshape(self.heads, -1, 2, whole.shape[-1])
        return [by_head.swapaxes(1, 2).reshape(whole.shape).T]

    def write(self, ours: Sequence[Array]) -> list[Array]:
        (whole,) = ours
        by_head = whole.T.reshape(self.heads, 2, -1, whole.shape[0])
        return [by_head.swapaxes(1, 2).reshape(whole.T.shape)]


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclasses.dataclass(frozen=True)
class MXFP4(Transform):
    """Blocks of 4-bit floats with a shared exponent (OCP MX, version 1.0, section 5.3), then another transform.

    Their tensors are uint8 [expert, out, blocks, 16], with two numbers per byte, the low 4 bits first, and exponents
    uint8 [expert, out, blocks]. Only reading is supported: export writes unquantized tensors.
    """

    then: Transform

    def pieces(
        self, get: Callable[[str], Array], theirs: Sequence[str], shapes: Shapes
    ) -> Iterator[tuple[int, tuple[int, ...], Array]]:
        of_expert = [shape[1:] for shape in shapes]
        for expert, (blocks, exponents) in enumerate(zip(*map(get, theirs), strict=True)):
            numbers = np.stack([FP4[blocks & 15], FP4[blocks >> 4]], axis=-1).reshape(*blocks.shape[:-1], -1)
            wide = np.ldexp(numbers, exponents.astype(np.int32)[..., None] - 127)
            for number, part in enumerate(self.then.read([wide.reshape(len(blocks), -1).T], of_expert)):
                yield number, (expert,), part

    def write(self, ours: Sequence[Array]) -> list[Array]:
        raise NotImplementedError

    def expected(self, shapes: Shapes) -> list[tuple[int, ...]]:
        (experts, width, out) = self.then.expected(shapes)[0]
        return [(experts, out, width // 32, 16), (experts, out, width // 32)]
