"""What axcore-new-recurrent offers. Imports neither jax nor flax."""

from axcore.plugin import Feature, hookimpl

axcore_api = 2


@hookimpl
def axcore_features() -> list[Feature]:
    return [Feature("new-recurrent", "axcore_new_recurrent.min_gru:use_min_gru", "minGRU in place of attention.")]
