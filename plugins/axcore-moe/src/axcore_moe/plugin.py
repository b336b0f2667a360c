"""What axcore-moe offers. Imports neither jax nor flax."""

from axcore.plugin import Feature, hookimpl


@hookimpl
def axcore_features() -> list[Feature]:
    return [Feature("moe", "axcore_moe.feature:use_moe", "Mixtures of experts in place of feed-forward blocks.")]
