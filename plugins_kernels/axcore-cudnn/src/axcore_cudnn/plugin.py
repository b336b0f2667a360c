"""What axcore-cudnn offers. Imports neither jax nor flax."""

from axcore.plugin import AttentionKernelOffer, Feature, hookimpl


@hookimpl
def axcore_features() -> list[Feature]:
    return [Feature("cudnn", "axcore_cudnn.kernel:use_cudnn", "cuDNN flash attention in every attention.")]


@hookimpl
def axcore_attention_kernels() -> list[AttentionKernelOffer]:
    return [
        AttentionKernelOffer("cudnn", "axcore_cudnn.kernel:CudnnKernel", "cuDNN flash attention, bfloat16 and float16.")
    ]
