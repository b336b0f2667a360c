"""What axcore-rope offers. Imports neither jax nor flax."""

from axcore.plugin import Feature, hookimpl


@hookimpl
def axcore_features() -> list[Feature]:
    return [
        Feature("alibi", "axcore_rope.alibi:use_alibi", "Linear biases by distance in every attention."),
        Feature(
            "learned-positions", "axcore_rope.learned:use_learned_positions", "A learned vector for each position."
        ),
        Feature("rope", "axcore_rope.feature:use_rope", "Rotary position embedding in every attention."),
    ]
