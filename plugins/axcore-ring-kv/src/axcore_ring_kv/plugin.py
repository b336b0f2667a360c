"""What axcore-ring-kv offers. Imports neither jax nor flax."""

from axcore.plugin import Feature, KVCacheOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_kv_caches() -> list[KVCacheOffer]:
    target = "axcore_ring_kv.cache:RingCache"
    return [KVCacheOffer("ring-kv", target, "A KV cache that keeps the tokens of a sliding window.")]


@hookimpl
def axcore_features() -> list[Feature]:
    target = "axcore_ring_kv.feature:use_ring_kv"
    return [Feature("ring-kv", target, "A ring cache in every attention with a sliding window.")]
