"""What axcore-rope offers. Imports neither jax nor flax."""

from axcore.plugin import Feature, hookimpl


@hookimpl
def axcore_features() -> list[Feature]:
    return [Feature("rope", "axcore_rope.rotary:use_rope", "Rotary position embedding in every attention.")]
