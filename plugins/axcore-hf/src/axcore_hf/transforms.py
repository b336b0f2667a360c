"""How tensors of a checkpoint become parameters, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from axcore.config import AxcoreError

Array = np.ndarray[Any, np.dtype[Any]]
Shapes = Sequence[tuple[int, ...]]


class Transform:
    """Base: some tensors of theirs <-> some parameters of ours."""

    def read(self, theirs: Sequence[Array], shapes: Shapes) -> list[Array]:
        """Our parameters.

        Args:
            shapes: those that they must have.
        """
        raise NotImplementedError

    def pieces(
        self, get: Callable[[str], Array], theirs: Sequence[str], shapes: Shapes
    ) -> Iterator[tuple[int, tuple[int, ...], Array]]:
        """Our parameters, in pieces as large as what must be in memory at once.

        Args:
            get: reads one of their tensors.
            theirs: their names.

        Yields:
            (which parameter, index on its leading axes, what is there).
        """
        for number, part in enumerate(self.read([get(name) for name in theirs], shapes)):
            yield number, (), part

    def write(self, ours: Sequence[Array]) -> list[Array]:
        """Their tensors."""
        raise NotImplementedError

    def expected(self, shapes: Shapes) -> list[tuple[int, ...]]:
        """The shapes of their tensors, for parameters of these shapes."""
        ours = [np.broadcast_to(np.zeros((), np.int8), shape) for shape in shapes]
        return [each.shape for each in self.write(ours)]


class Plain(Transform):
    """As it is."""

    def read(self, theirs: Sequence[Array], shapes: Shapes) -> list[Array]:
        return list(theirs)

    def write(self, ours: Sequence[Array]) -> list[Array]:
        return list(ours)


class Tied(Transform):
    """Two copies of one matrix, of which one is kept."""

    def read(self, theirs: Sequence[Array], shapes: Shapes) -> list[Array]:
        first, second = theirs
        if not np.array_equal(first, second):
            raise AxcoreError(
                "tie_word_embeddings is true, and the checkpoint has an embedding and a head that differ; set it to "
                "false in config.json if both are meant"
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
    """One tensor of theirs holds several of ours, one after another in the output dimension.

    Attributes:
        transposed: whether theirs is [out, in].
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
class PerHead(Transform):
    """One [heads * features, in] of theirs holds, head by head, the features of each of ours [in, heads * features]."""

    heads: int

    def read(self, theirs: Sequence[Array], shapes: Shapes) -> list[Array]:
        (whole,) = theirs
        by_head = whole.reshape(self.heads, -1, whole.shape[-1])
        ends = np.cumsum([shape[-1] // self.heads for shape in shapes])[:-1]
        return [each.reshape(-1, whole.shape[-1]).T for each in np.split(by_head, ends, axis=1)]

    def write(self, ours: Sequence[Array]) -> list[Array]:
        parts = [each.T.reshape(self.heads, -1, each.shape[0]) for each in ours]
        whole = np.concatenate(parts, axis=1)
        return [whole.reshape(-1, whole.shape[-1])]


class Interleaved(Transform):
    """One tensor of theirs holds two of ours, whose features take turns in its last dimension."""

    def read(self, theirs: Sequence[Array], shapes: Shapes) -> list[Array]:
        (whole,) = theirs
        return [whole[..., ::2], whole[..., 1::2]]

    def write(self, ours: Sequence[Array]) -> list[Array]:
        whole = np.stack(ours, axis=-1)
        return [whole.reshape(*whole.shape[:-2], -1)]


class Stacked(Transform):
    """One [out, in] of theirs for each expert <-> one [expert, in, out]."""

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
    """[heads * head_dim, in] with rows for interleaved RoPE, as llama.cpp has them <-> [in, heads * head_dim] for RoPE
    in halves."""

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

    Theirs are uint8 [expert, out, blocks, 16], two numbers in each byte, the low half first, and exponents uint8
    [expert, out, blocks]. It is read only: what is written is not quantized again.
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
