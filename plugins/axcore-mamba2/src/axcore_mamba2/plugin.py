"""What axcore-mamba2 offers. Imports neither jax nor flax."""

from axcore.plugin import Feature, hookimpl


@hookimpl
def axcore_features() -> list[Feature]:
    return [Feature("mamba2", "axcore_mamba2.feature:use_mamba2", "Mamba-2 in place of all or most attentions.")]
