"""What axcore-mosaic-gpu offers. Imports neither jax nor flax."""

from axcore.plugin import GroupedMatmulOffer, hookimpl


@hookimpl
def axcore_grouped_matmuls() -> list[GroupedMatmulOffer]:
    return [GroupedMatmulOffer("mosaic-gpu", "axcore_mosaic_gpu.grouped:MosaicGrouped", "Pallas kernels for Hopper.")]
