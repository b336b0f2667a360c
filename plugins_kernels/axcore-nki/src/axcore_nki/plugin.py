"""What axcore-nki offers. Imports neither jax nor flax."""

from axcore.plugin import AttentionKernelOffer, Feature, hookimpl

_SUMMARY = "NKI flash attention, bfloat16, Trainium2 and later; not run on Trainium yet."


@hookimpl
def axcore_features() -> list[Feature]:
    return [Feature("nki", "axcore_nki.kernel:use_nki", f"In every attention: {_SUMMARY}")]


@hookimpl
def axcore_attention_kernels() -> list[AttentionKernelOffer]:
    return [AttentionKernelOffer("nki", "axcore_nki.kernel:NkiKernel", _SUMMARY)]
