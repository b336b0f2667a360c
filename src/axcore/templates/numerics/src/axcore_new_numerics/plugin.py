"""What axcore-new-numerics offers. Imports neither jax nor flax."""

from axcore.plugin import NumericsOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_numerics() -> list[NumericsOffer]:
    target = "axcore_new_numerics.integers:Integers"
    return [NumericsOffer("new-numerics", target, "Matrix products of integers of 8 bits or fewer.")]
