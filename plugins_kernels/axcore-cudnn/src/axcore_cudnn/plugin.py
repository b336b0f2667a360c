"""What axcore-cudnn offers. Imports neither jax nor flax."""

from axcore.plugin import AttentionKernelOffer, Feature, hookimpl


@hookimpl
def axcore_features() -> list[Feature]:
    return [
        Feature("cudnn", "axcore_cudnn.kernel:use_cudnn", "cuDNN flash attention in every attention."),
        Feature("cudnn-fp8", "axcore_cudnn.fp8_kernel:use_cudnn_fp8", "cuDNN attention on FP8 codes."),
    ]


@hookimpl
def axcore_attention_kernels() -> list[AttentionKernelOffer]:
    return [
        AttentionKernelOffer(
            "cudnn", "axcore_cudnn.kernel:CudnnKernel", "cuDNN flash attention, bfloat16 and float16."
        ),
        AttentionKernelOffer("cudnn-fp8", "axcore_cudnn.fp8_kernel:CudnnFp8Kernel", "cuDNN attention on FP8 codes."),
    ]
