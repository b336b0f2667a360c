"""What axcore-gemv offers. Imports neither jax nor flax."""

from axcore.plugin import Feature, hookimpl

axcore_api = 2


@hookimpl
def axcore_features() -> list[Feature]:
    return [Feature("gemv", "axcore_gemv.feature:use_gemv", "Pallas kernels for products of few rows, to decode.")]
