"""What axcore-new-attention offers. Imports neither jax nor flax."""

from axcore.plugin import AttentionKernel, hookimpl

axcore_api = 1


@hookimpl
def axcore_attention_kernels() -> list[AttentionKernel]:
    target = "axcore_new_attention.kernel:BlockKernel"
    return [AttentionKernel("new-attention", target, "Blocks of keys, one after another, with an online softmax.")]
