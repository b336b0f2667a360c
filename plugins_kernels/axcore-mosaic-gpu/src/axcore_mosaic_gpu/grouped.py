"""Grouped matrix products by Mosaic-GPU kernels."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from axcore.config import Config, ConfigError, PositiveInt
from axcore.nn import GroupedMatmul, GroupedRequest
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

    def supports(self, request: GroupedRequest) -> str | None:
        if request.platform != "gpu" or not _HOPPER.search(request.device_kind):
            return f"requires a Hopper GPU (H100, H200), got {request.device_kind or request.platform}"
        if request.sharded:
            return (
                f"runs on the rows of one device, and XLA would gather those of the mesh axes "
                f"{', '.join(request.sharded)}; dispatch=Exchange() computes on each device's own rows"
            )
        if not request.plain:
            return "does not multiply by numerics or adapters, which have other dtypes or sizes"
        if request.dtype not in (jnp.bfloat16, jnp.float16):
            return f"requires bfloat16 or float16, got {request.dtype}"
        if request.input_dim % 64 or request.output_dim % 64:
            return f"requires multiples of 64 features, got {request.input_dim} and {request.output_dim}"
        return None

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
        return self.each(x, (matrices,), sizes, group, accumulate)[0]

    def each(
        self,
        x: Float[Array, "rows input_dim"],
        several: Sequence[Float[Array, "group input_dim output_dim"]],
        sizes: Int[Array, " group"],
        group: Int[Array, " blocks"],
        accumulate: DTypeLike | None = None,
    ) -> tuple[Float[Array, "rows output_dim"], ...]:
        """See `GroupedMatmul`. One kernel computes the gradient of x, with float32 sums over all matrices.

        Raises:
            ConfigError: the device, the dtype or the number of features is not supported.
        """
        if (reason := self.supports(GroupedRequest.of(x.dtype, *several[0].shape[1:]))) is not None:
            raise ConfigError(f"matmul=MosaicGrouped() {reason}. Use Blocks()")
        ends = jnp.cumsum(sizes, dtype=jnp.int32)
        unused = 128 * jnp.arange(group.size, dtype=jnp.int32) >= ends[-1]
        group = jnp.where(unused, sizes.size, group).astype(jnp.int32)
        return _products(self, accumulate, x, tuple(several), group, ends)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _products(
    cfg: MosaicGrouped,
    accumulate: DTypeLike | None,
    x: jax.Array,
    several: tuple[jax.Array, ...],
    group: jax.Array,
    ends: jax.Array,
) -> tuple[jax.Array, ...]:
    dtype = x.dtype if accumulate is None else accumulate
    tiling = cfg.forward.of(128, several[0].shape[2], x.dtype, dtype)
    return tuple(
        rows_product(
            [(x, matrices)], group, tiling=tiling, transposed=False, dtype=dtype, multiprocessors=_MULTIPROCESSORS
        )
        for matrices in several
    )


def _forward(
    cfg: MosaicGrouped,
    accumulate: DTypeLike | None,
    x: jax.Array,
    several: tuple[jax.Array, ...],
    group: jax.Array,
    ends: jax.Array,
) -> tuple[tuple[jax.Array, ...], tuple[Any, ...]]:
    return _products(cfg, accumulate, x, several, group, ends), (x, several, group, ends)


def _backward(
    cfg: MosaicGrouped, accumulate: DTypeLike | None, kept: tuple[Any, ...], gradients: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...], None, None]:
    x, several, group, ends = kept
    gradients = tuple(g.astype(x.dtype) for g in gradients)
    of_rows = cfg.input_gradient.of(128, several[0].shape[1], x.dtype, x.dtype)
    of_groups = cfg.weight_gradient.of(128, several[0].shape[2], x.dtype, several[0].dtype)
    dx = rows_product(
        list(zip(gradients, several, strict=True)),
        group,
        tiling=of_rows,
        transposed=True,
        dtype=x.dtype,
        multiprocessors=_MULTIPROCESSORS,
    )
    totals = tuple(
        groups_product(x, g, ends, tiling=of_groups, dtype=several[0].dtype, multiprocessors=_MULTIPROCESSORS)
        for g in gradients
    )
    return dx, totals, None, None


_products.defvjp(_forward, _backward)
