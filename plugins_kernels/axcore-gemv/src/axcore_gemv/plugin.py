"""What axcore-gemv offers. Imports neither jax nor flax."""

from axcore.plugin import Feature, hookimpl

axcore_api = 2


@hookimpl
def axcore_features() -> list[Feature]:
    return [Feature("gemv", "axcore_gemv.feature:use_gemv", "a Pallas kernel for products of one row, to decode.")]
