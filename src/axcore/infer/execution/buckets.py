"""The sizes of the calls of a model, for each of which programs are compiled."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

LARGEST_PART = 128
"""Tokens of the parts into which prompts are divided, if a step has several times as many."""
SHORT = 64
"""Tokens of a short prompt. Without parts, several such prompts may be computed together with rows that decode."""
LONG = 256
"""Without parts, the number of tokens up to which a longer prompt has a program of its own only if no row decodes."""
FEW_ROWS = 16
"""Up to this number, rows that decode are padded to powers of four; above it, to powers of two. A step of few rows
takes the time to read the weights, so padding costs little. With more rows, products and keys take time, too."""
SMALLEST = 16
"""A prompt is padded to at least this many tokens."""


class Shape(NamedTuple):
    """The rows of a call that compute parts of prompts.

    Attributes:
        rows: the number of rows.
        width: the largest number of new tokens of a row.
    """

    rows: int
    width: int


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The sizes to which calls are padded, ascending.

    Attributes:
        rows: rows that decode.
        prompts: rows that compute prompts, by number of tokens.
        mixed: such rows that are computed together with rows that decode, of which there are `rows[-1]`. There are few
            shapes, since each requires a program.
        widths: new tokens of a prompt that is computed by a call of its own, because its log-probabilities or hidden
            states are asked for.
        pages: pages of a row in the page table; empty if the caches have no pages.
        part: the tokens of the parts into which prompts are divided, which are rows of one call; None: a row has a
            whole chunk of a prompt. Parts waste little padding, whatever the lengths of the prompts of a step, but
            require `Decoder.shares_prefixes`.
    """

    rows: tuple[int, ...]
    prompts: tuple[Shape, ...]
    mixed: tuple[Shape, ...]
    widths: tuple[int, ...]
    pages: tuple[int, ...]
    part: int | None

    @classmethod
    def of(
        cls,
        max_rows: int,
        step_tokens: int,
        max_len: int,
        pages_per_row: int | None,
        tables: int,
        *,
        has_parts: bool,
        burst_tokens: int | None = None,
    ) -> Buckets:
        """Rows that decode are padded to powers of two (see `FEW_ROWS`), tokens of prompts to powers of four up to
        `step_tokens`, and those of a burst, in which no row decodes, to `burst_tokens`. Without pages, all rows decode
        in every call, so that caches are read in place.

        Args:
            max_rows, step_tokens, max_len, burst_tokens: see `Engine.Config`.
            pages_per_row: the largest number of pages of a row; None: the caches have no pages.
            tables: the number of sizes of page tables. Each is a quarter of the next.
            has_parts: whether prompts are divided into parts.
        """
        widths, part = _powers(SMALLEST, min(burst_tokens or step_tokens, max_len), 4), None
        if has_parts:
            part = min(LARGEST_PART, max(SMALLEST, step_tokens // 4), max_len)
            sizes = _powers(SMALLEST, -(-step_tokens // part) * part, 4)
            prompts = tuple(Shape(-(-size // part), min(size, part)) for size in sizes)
            mixed = tuple(shape for shape in prompts if shape.rows * shape.width > SHORT) or prompts[-1:]
            prompts += () if burst_tokens is None else (Shape(-(-burst_tokens // part), part),)
        else:
            prompts = tuple(Shape(1, width) for width in widths)
            mixed = tuple(shape for shape in prompts if shape.width > LONG) or prompts[-1:]
            if mixed[0].width > SHORT:
                mixed = Shape(min(max_rows, max(1, step_tokens // LONG)), SHORT), *mixed
        if pages_per_row is None:
            return cls((max_rows,), prompts, mixed, widths, (), part)
        pages = {-(-pages_per_row // 4**quarter) for quarter in range(tables)}
        rows = _powers(1, min(max_rows, FEW_ROWS), 4)
        if max_rows > FEW_ROWS:
            rows += _powers(2 * FEW_ROWS, max_rows, 2)
        return cls(rows, prompts, mixed, widths, tuple(sorted(pages)), part)

    def fit(self, counts: Sequence[int], *, mixed: bool) -> tuple[int, Shape]:
        """How many of these chunks of prompts fit into one call, the first ones, and the smallest shape for them.

        Args:
            counts: the number of tokens of each chunk, at least one chunk.
            mixed: whether rows that decode are computed together with them.
        """
        shapes = self.mixed if mixed else self.prompts
        for number in range(len(counts), 0, -1):
            for shape in shapes:
                if self._fits(counts[:number], shape):
                    return number, shape
        raise AssertionError(f"a chunk of {counts[0]} tokens does not fit into {shapes}")

    def _fits(self, counts: Sequence[int], shape: Shape) -> bool:
        if self.part is not None:
            return sum(-(-count // shape.width) for count in counts) <= shape.rows
        return len(counts) <= shape.rows and max(counts) <= shape.width


def _powers(size: int, largest: int, factor: int) -> tuple[int, ...]:
    """size, factor * size, ... below `largest`, and `largest`."""
    sizes = []
    while size < largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)


def bucket(sizes: Sequence[int], size: int) -> int:
    """The smallest of the ascending `sizes` that is at least `size`."""
    return sizes[bisect.bisect_left(sizes, size)]
