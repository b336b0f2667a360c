"""What axcore-new-layer offers. Imports neither jax nor flax."""

from axcore.plugin import Feature, hookimpl

axcore_api = 2


@hookimpl
def axcore_features() -> list[Feature]:
    return [Feature("new-layer", "axcore_new_layer.gate:use_gate", "A sigmoid gate on each head's output.")]
