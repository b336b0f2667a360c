"""What axcore-new-quantizer offers. Imports neither jax nor flax."""

from axcore.plugin import Quantizer, hookimpl

axcore_api = 1


@hookimpl
def axcore_quantizers() -> list[Quantizer]:
    target = "axcore_new_quantizer.integers:Integers"
    return [Quantizer("new-quantizer", target, "Matrix products of integers of 8 bits or fewer.")]
