"""The product of a `Linear` by the kernel."""

from __future__ import annotations

import math
import re
from typing import ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from axcore.config import ConfigError, PositiveInt
from axcore.nn import Matmul
from axcore.parallel import target_device
from axcore_gemv.kernel import Tiling, product

_MULTIPROCESSORS = {"A[18]00": 108, "H20": 78, "G?H[128]00": 132, "G?B200": 148}
"""Pattern of a device kind -> its multiprocessors."""


class Gemv(Matmul):
    """The product of one row with a matrix in bfloat16, float16, float32, int8 or float8, which a kernel reads once.

    Sums are in float32. Products of more rows, such as those of a prompt, those of integers, and those of matrices
    whose columns do not have a multiple of 4 bytes stay with XLA. On several devices, each multiplies by its shard of
    the matrix. For inference: the kernel has no gradient.
    """

    reads_columns: ClassVar[bool] = True

    warps: PositiveInt | None = None
    """Warps of a program, a power of two of at most 32. None for this and the next field: chosen from the shapes."""
    programs: PositiveInt | None = None
    """Programs for each multiprocessor of the GPU."""

    def is_local(self, rows: int) -> bool:
        return rows == 1

    def __call__(
        self,
        x: Float[Array, "*shape input_dim"],
        weight: Shaped[Array, "input_dim output_dim"],
        accumulate: DTypeLike | None = None,
        scales: Float[Array, " output_dim"] | None = None,
    ) -> Float[Array, "*shape output_dim"]:
        """See `Matmul`.

        Raises:
            ConfigError: the device is not an NVIDIA GPU since A100, or a field is not valid.
        """
        depth, outputs = weight.shape
        is_row = math.prod(x.shape[:-1]) == 1 and jnp.issubdtype(x.dtype, jnp.floating)
        if not is_row or depth * weight.dtype.itemsize % 4 or not weight.size:
            return super().__call__(x, weight, accumulate, scales)
        tiling = self.tiling(depth, outputs, weight.dtype.itemsize, _multiprocessors())
        dtype = jnp.dtype(accumulate or x.dtype)
        scales = None if scales is None else jnp.broadcast_to(scales.astype(jnp.float32), outputs)
        y = product(x.reshape(-1), weight.T, scales, dtype=dtype, tiling=tiling)
        return y.reshape(*x.shape[:-1], -1)

    def tiling(self, depth: int, outputs: int, itemsize: int, multiprocessors: int) -> Tiling:
        """How the kernel divides a product with a matrix [depth, outputs].

        Args:
            itemsize: bytes of an element of the matrix.
            multiprocessors: of the GPU.
        """
        warps, programs = default_tiling(depth, itemsize)
        warps = self.warps or warps
        if warps > 32 or warps & (warps - 1):
            raise ConfigError(f"matmul=Gemv: warps={warps} must be a power of two of at most 32")
        return Tiling(warps, min(outputs, multiprocessors * (self.programs or programs)))


def default_tiling(depth: int, itemsize: int) -> tuple[int, int]:
    """The warps of a program and the programs of a multiprocessor: the fastest of those measured on an H200
    (`benchmarks/RESULTS.md`). A thread has up to three loads of 16 bytes for each output, and as many programs run as
    the registers allow."""
    loads = -(-depth * itemsize // (16 * 32))
    warps = min(16, max(1, 1 << (-(-loads // 3) - 1).bit_length()))
    if itemsize == 1 and loads > 2 * warps:
        return warps, max(1, 24 // warps)
    return warps, 5 if itemsize > 1 and warps == 8 else 32 // warps


def _multiprocessors() -> int:
    """Those of the device.

    Raises:
        ConfigError: the kernel cannot run on it.
    """
    platform, kind = target_device()
    found = [count for name, count in _MULTIPROCESSORS.items() if re.search(rf"{name}\b", kind)]
    if platform not in ("gpu", "cuda") or not found:
        raise ConfigError(
            f"matmul=Gemv() requires an A100, H100, H200 or B200 GPU, got {kind or platform}. Leave out the feature "
            f"gemv"
        )
    return found[0]
