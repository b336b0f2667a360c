"""What axcore-cross-layer-kv offers. Imports neither jax nor flax."""

from axcore.plugin import Feature, hookimpl

axcore_api = 2


@hookimpl
def axcore_features() -> list[Feature]:
    target = "axcore_cross_layer_kv.groups:use_cross_layer_kv"
    return [Feature("cross-layer-kv", target, "Keys and values shared by groups of layers.")]
