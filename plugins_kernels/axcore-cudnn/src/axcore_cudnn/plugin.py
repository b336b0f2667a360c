"""What axcore-cudnn offers. Imports neither jax nor flax."""

from axcore.plugin import AttentionKernel, Feature, hookimpl


@hookimpl
def axcore_features() -> list[Feature]:
    return [Feature("cudnn", "axcore_cudnn.kernel:use_cudnn", "cuDNN flash attention in every attention.")]


@hookimpl
def axcore_attention_kernels() -> list[AttentionKernel]:
    return [AttentionKernel("cudnn", "axcore_cudnn.kernel:CudnnKernel", "cuDNN flash attention, bfloat16 and float16.")]
