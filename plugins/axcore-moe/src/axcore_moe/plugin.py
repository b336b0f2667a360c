"""What axcore-moe offers. Imports neither jax nor flax."""

from axcore.plugin import Feature, GroupedMatmulOffer, hookimpl


@hookimpl
def axcore_features() -> list[Feature]:
    return [Feature("moe", "axcore_moe.feature:use_moe", "Mixtures of experts in place of feed-forward blocks.")]


@hookimpl
def axcore_grouped_matmuls() -> list[GroupedMatmulOffer]:
    return [GroupedMatmulOffer("tokamax", "axcore_moe.matmul:Tokamax", "Grouped products by tokamax, if installed.")]
