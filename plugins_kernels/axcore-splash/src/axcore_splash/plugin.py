"""What axcore-splash offers. Imports neither jax nor flax."""

from axcore.plugin import AttentionKernelOffer, Feature, hookimpl


@hookimpl
def axcore_features() -> list[Feature]:
    return [Feature("splash", "axcore_splash.kernel:use_splash", "Splash attention (TPU) in every attention.")]


@hookimpl
def axcore_attention_kernels() -> list[AttentionKernelOffer]:
    return [
        AttentionKernelOffer("splash", "axcore_splash.kernel:SplashKernel", "Splash attention on TPUs, fused backward.")
    ]
