"""Grouped matrix products by Mosaic-GPU kernels."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from axcore.config import Config, ConfigError, PositiveInt
from axcore.nn import GroupedMatmul
from axcore.parallel import target_device
from axcore_mosaic_gpu.kernels import SHARED_MEMORY, Tiling, groups_product, rows_product

_HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")
"""Matches the names of Hopper GPUs, such as "NVIDIA H100 80GB HBM3" and "NVIDIA GH200 480GB"."""
_MULTIPROCESSORS = 132
"""Of the SXM and NVL cards. Fewer run the kernels too, with some of the blocks in a second wave."""
_LARGEST_STAGES = 6


class Tiles(Config):
    """How the kernel of one product divides its work. None: chosen from the shapes."""

    columns: PositiveInt | None = None
    """Columns of a tile of the result: 128 or 256."""
    stages: PositiveInt | None = None
    """Number of stages in shared memory; at least 2."""
    width: PositiveInt | None = None
    """Number of neighboring tiles of a row that are computed before those of the next row."""

    def of(self, rows: int, columns: int, operand: DTypeLike, result: DTypeLike) -> Tiling:
        """The tiling of a result with this many columns, in tiles of `rows` rows.

        Raises:
            ConfigError: the stages do not fit in shared memory.
        """
        n = self.columns or (256 if columns % 256 == 0 or columns > 1024 else 128)
        if n not in (128, 256):
            raise ConfigError(f"columns={n} is not 128 or 256. Leave it out to have it chosen")
        stage = (rows + n) * 64 * jnp.dtype(operand).itemsize
        epilogue = 2 * 2 * 64 * 64 * jnp.dtype(result).itemsize
        fit = (SHARED_MEMORY - epilogue - 1024) // stage
        stages = self.stages or min(_LARGEST_STAGES, fit)
        if not 2 <= stages <= fit:
            raise ConfigError(f"stages={stages} is not between 2 and {fit}, which fit in shared memory")
        return Tiling(rows, n, 64, stages, self.width or 8, split_m=False)


class MosaicGrouped(GroupedMatmul):
    """Grouped products on NVIDIA Hopper GPUs, forward and both gradients, in bfloat16 and float16 with float32 sums.

    Groups are padded to multiples of 128 rows. Numbers of features must be multiples of 64, the width of the tiles that
    the hardware copies.
    """

    forward: Tiles = Tiles()
    input_gradient: Tiles = Tiles()
    weight_gradient: Tiles = Tiles()

    def align(self, rows: int, groups: int) -> int:
        return 128

    def __call__(
        self,
        x: Float[Array, "rows input_dim"],
        matrices: Float[Array, "group input_dim output_dim"],
        sizes: Int[Array, " group"],
        group: Int[Array, " blocks"],
        accumulate: DTypeLike | None = None,
    ) -> Float[Array, "rows output_dim"]:
        """See `GroupedMatmul`.

        Raises:
            ConfigError: the device, the dtype or the number of features is not supported.
        """
        self._check(x, matrices)
        ends = jnp.cumsum(sizes, dtype=jnp.int32)
        unused = 128 * jnp.arange(group.size, dtype=jnp.int32) >= ends[-1]
        group = jnp.where(unused, sizes.size, group).astype(jnp.int32)
        return _product(self, accumulate, x, matrices, group, ends)

    def _check(self, x: jax.Array, matrices: jax.Array) -> None:
        platform, kind = target_device()
        if platform != "gpu" or not _HOPPER.search(kind):
            raise ConfigError(
                f"matmul=MosaicGrouped() requires a Hopper GPU (H100, H200), got {kind or platform}. Use Blocks()"
            )
        if x.dtype not in (jnp.bfloat16, jnp.float16):
            raise ConfigError(f"matmul=MosaicGrouped() requires bfloat16 or float16, got {x.dtype}. Use Blocks()")
        _, inner, outer = matrices.shape
        if inner % 64 or outer % 64:
            raise ConfigError(
                f"matmul=MosaicGrouped() requires multiples of 64 features, got {inner} and {outer}. Use Blocks()"
            )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(
    cfg: MosaicGrouped,
    accumulate: DTypeLike | None,
    x: jax.Array,
    matrices: jax.Array,
    group: jax.Array,
    ends: jax.Array,
) -> jax.Array:
    dtype = x.dtype if accumulate is None else accumulate
    tiling = cfg.forward.of(128, matrices.shape[2], x.dtype, dtype)
    return rows_product(
        x, matrices, group, tiling=tiling, transposed=False, dtype=dtype, multiprocessors=_MULTIPROCESSORS
    )


def _forward(
    cfg: MosaicGrouped,
    accumulate: DTypeLike | None,
    x: jax.Array,
    matrices: jax.Array,
    group: jax.Array,
    ends: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _product(cfg, accumulate, x, matrices, group, ends), (x, matrices, group, ends)


def _backward(
    cfg: MosaicGrouped, accumulate: DTypeLike | None, kept: tuple[jax.Array, ...], g: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    x, matrices, group, ends = kept
    g = g.astype(x.dtype)
    of_rows = cfg.input_gradient.of(128, matrices.shape[1], x.dtype, x.dtype)
    of_groups = cfg.weight_gradient.of(128, matrices.shape[2], x.dtype, matrices.dtype)
    dx = rows_product(
        g, matrices, group, tiling=of_rows, transposed=True, dtype=x.dtype, multiprocessors=_MULTIPROCESSORS
    )
    total = groups_product(x, g, ends, tiling=of_groups, dtype=matrices.dtype, multiprocessors=_MULTIPROCESSORS)
    return dx, total, None, None


_product.defvjp(_forward, _backward)
