"""What axcore-new-optimizer offers. Imports neither jax nor flax."""

from axcore.plugin import OptimizerOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_optimizers() -> list[OptimizerOffer]:
    target = "axcore_new_optimizer.lion:Lion"
    return [OptimizerOffer("new-optimizer", target, "Signs of interpolated momentum.")]
