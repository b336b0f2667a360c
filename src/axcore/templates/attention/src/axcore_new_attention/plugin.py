"""What axcore-new-attention offers. Imports neither jax nor flax."""

from axcore.plugin import AttentionKernelOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_attention_kernels() -> list[AttentionKernelOffer]:
    target = "axcore_new_attention.kernel:BlockKernel"
    return [AttentionKernelOffer("new-attention", target, "Attention over blocks of keys with an online softmax.")]
