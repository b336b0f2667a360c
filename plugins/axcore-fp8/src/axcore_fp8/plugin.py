"""What axcore-fp8 offers. Imports neither jax nor flax."""

from axcore.plugin import Feature, NumericsOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_features() -> list[Feature]:
    return [Feature("fp8", "axcore_fp8.feature:use_fp8", "FP8 products in all layers but the first and the last.")]


@hookimpl
def axcore_numerics() -> list[NumericsOffer]:
    return [NumericsOffer("fp8", "axcore_fp8.fp8:Fp8", "Matrix products of 8-bit floating-point numbers.")]
