"""What axcore-paged-attention offers. Imports neither jax nor flax."""

from axcore.plugin import AttentionKernelOffer, Feature, hookimpl

axcore_api = 2


@hookimpl
def axcore_features() -> list[Feature]:
    target = "axcore_paged_attention.kernel:use_paged_attention"
    return [Feature("paged-attention", target, "Decoding and parts of prompts read KV caches in place (GPU).")]


@hookimpl
def axcore_attention_kernels() -> list[AttentionKernelOffer]:
    target = "axcore_paged_attention.kernel:PagedAttention"
    return [
        AttentionKernelOffer("paged-attention", target, "Reads pages and cache rows in place on GPUs; few queries.")
    ]
