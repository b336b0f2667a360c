"""The product of a `Linear` by the kernel."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from axcore.config import ConfigError, PositiveInt
from axcore.nn import Matmul
from axcore.parallel import is_sharded, target_device
from axcore_gemv.kernel import DOT_ROWS, Tiling, default_tiling, partial_products

_MULTIPROCESSORS = {r"A100|A800": 108, r"H20\b|H100|H200|H800|GH200": 132, r"B200|GB200": 148}


class Gemv(Matmul):
    """Products of few rows with a matrix in bfloat16, float16, float32, int8 or float8, which a kernel reads once.

    Sums are in float32. Products of more than `max_rows` rows, such as those of a prompt, stay with XLA. For
    inference: the kernel has no gradient.
    """

    max_rows: PositiveInt = DOT_ROWS
    """The kernel computes products of at most this many rows; at most 16."""
    columns: PositiveInt | None = None
    """Columns of a tile, a power of two of at least 16. None for this and the next fields: chosen from the shapes."""
    inputs: PositiveInt | None = None
    """Inputs of a tile, a power of two of at least 16."""
    loads: PositiveInt | None = None
    """Number of tiles that a program loads at the same time."""
    splits: PositiveInt | None = None
    """Number of programs that divide the inputs of the same columns."""
    warps: PositiveInt | None = None
    """Warps of a program, a power of two."""
    tensor_cores: bool | None = None
    """Whether tensor cores multiply, which more than one row require. None: only for more than one row."""

    def __call__(
        self,
        x: Float[Array, "*shape input_dim"],
        weight: Shaped[Array, "input_dim output_dim"],
        accumulate: DTypeLike | None = None,
    ) -> Float[Array, "*shape output_dim"]:
        """See `Matmul`.

        Raises:
            ConfigError: the device is not an NVIDIA GPU since A100, arrays are sharded over several devices, or a
                field is not valid.
        """
        if self.max_rows > DOT_ROWS:
            raise ConfigError(f"matmul=Gemv: max_rows={self.max_rows} must be at most {DOT_ROWS}")
        rows = math.prod(x.shape[:-1])
        if rows > self.max_rows or rows == 0:
            return super().__call__(x, weight, accumulate)
        tiling = self.tiling(rows, weight, _multiprocessors())
        parts = partial_products(x.reshape(rows, -1), weight, tiling=tiling)
        # Additions, unlike a reduction, are fused into the operation that follows.
        total = parts[0]
        for number in range(1, tiling.splits):
            total = total + parts[number]
        return total.astype(accumulate or x.dtype).reshape(*x.shape[:-1], -1)

    def tiling(self, rows: int, weight: jax.Array, multiprocessors: int) -> Tiling:
        """How the kernel divides a product."""
        depth, columns = weight.shape
        if rows > 1 and self.tensor_cores is False:
            raise ConfigError(f"matmul=Gemv: tensor_cores=False computes one row, not {rows}. Set max_rows=1")
        itemsize = weight.dtype.itemsize
        chosen = default_tiling(rows, depth, columns, itemsize, multiprocessors, self.tensor_cores)
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(Tiling)}
        fields = dataclasses.asdict(chosen) | {name: value for name, value in given.items() if value is not None}
        for name, least in (("columns", 16), ("inputs", 16), ("warps", 1)):
            value = fields[name]
            if value < least or value & (value - 1):
                raise ConfigError(f"matmul=Gemv: {name}={value} must be a power of two of at least {least}")
        return Tiling(**fields)


def _multiprocessors() -> int:
    """The number of multiprocessors of the device.

    Raises:
        ConfigError: the kernel cannot run there.
    """
    platform, kind = target_device()
    found = [count for pattern, count in _MULTIPROCESSORS.items() if re.search(pattern, kind)]
    if platform not in ("gpu", "cuda") or not found:
        raise ConfigError(
            f"matmul=Gemv() requires an A100, H100, H200 or B200 GPU, got {kind or platform}. Leave out the feature "
            f"gemv"
        )
    if is_sharded():
        raise ConfigError(
            "matmul=Gemv() computes on one device, but arrays may be sharded over several. Leave out the feature gemv"
        )
    return found[0]
