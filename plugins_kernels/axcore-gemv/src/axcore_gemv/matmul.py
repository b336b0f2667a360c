"""The product of a `Linear` by the kernel."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import ClassVar

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from axcore.config import ConfigError, PositiveInt
from axcore.nn import Matmul
from axcore.parallel import is_sharded, target_device
from axcore_gemv.kernel import Tiling, product

_DEVICES = r"A100|A800|H20\b|H100|H200|H800|GH200|B200|GB200"


class Gemv(Matmul):
    """The product of one row with a matrix in bfloat16, float16, float32, int8 or float8, which a kernel reads once.

    Sums are in float32. Products of more rows, such as those of a prompt, stay with XLA. For inference: the kernel has
    no gradient.
    """

    reads_columns: ClassVar[bool] = True

    outputs: PositiveInt | None = None
    """Outputs that a program computes, a power of two. None for this and the next fields: chosen from the shapes."""
    inputs: PositiveInt | None = None
    """Inputs that a program loads at once, a power of two of at least 16."""
    loads: PositiveInt | None = None
    """Number of loads that a program has in flight at the same time."""
    warps: PositiveInt | None = None
    """Warps of a program, a power of two."""

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
        if math.prod(x.shape[:-1]) != 1:
            return super().__call__(x, weight, accumulate)
        _check_device()
        depth, outputs = weight.shape
        tiling = self.tiling(depth, outputs, weight.dtype.itemsize)
        y = product(x.reshape(-1), weight.T, tiling=tiling)
        return y.astype(accumulate or x.dtype).reshape(*x.shape[:-1], -1)

    def tiling(self, depth: int, outputs: int, itemsize: int) -> Tiling:
        """How the kernel divides a product with a matrix [depth, outputs].

        Args:
            itemsize: bytes of an element of the matrix.
        """
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(Tiling)}
        fields = dataclasses.asdict(default_tiling(depth, outputs, itemsize))
        fields |= {name: value for name, value in given.items() if value is not None}
        for name, least in (("outputs", 1), ("inputs", 16), ("warps", 1)):
            value = fields[name]
            if value < least or value & (value - 1):
                raise ConfigError(f"matmul=Gemv: {name}={value} must be a power of two of at least {least}")
        return Tiling(**fields)


def default_tiling(depth: int, outputs: int, itemsize: int) -> Tiling:
    """The fastest tiling of those measured on an H200 (`benchmarks/RESULTS.md`)."""
    if itemsize == 1:
        return Tiling(outputs=8, inputs=512, loads=2, warps=4)
    if depth % 4096 == 0 and outputs >= 8192:
        return Tiling(outputs=2, inputs=4096, loads=1, warps=8)
    if depth % 2048 == 0:
        return Tiling(outputs=4, inputs=2048, loads=2, warps=4)
    return Tiling(outputs=8, inputs=512, loads=2, warps=8)


def _check_device() -> None:
    """Raises a ConfigError if the kernel cannot run on the device."""
    platform, kind = target_device()
    if platform not in ("gpu", "cuda") or not re.search(_DEVICES, kind):
        raise ConfigError(
            f"matmul=Gemv() requires an A100, H100, H200 or B200 GPU, got {kind or platform}. Leave out the feature "
            f"gemv"
        )
    if is_sharded():
        raise ConfigError(
            "matmul=Gemv() computes on one device, but arrays may be sharded over several. Leave out the feature gemv"
        )
