"""What axcore-diff-attention offers. Imports neither jax nor flax."""

from axcore.plugin import Feature, hookimpl

axcore_api = 2


@hookimpl
def axcore_features() -> list[Feature]:
    target = "axcore_diff_attention.kernel:use_diff_attention"
    return [Feature("diff-attention", target, "The difference of two attention maps in every attention.")]
