"""What axcore-new-kv-cache offers. Imports neither jax nor flax."""

from axcore.plugin import KVCacheOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_kv_caches() -> list[KVCacheOffer]:
    target = "axcore_new_kv_cache.ring:RingCache"
    return [KVCacheOffer("new-kv-cache", target, "A rolling cache for sliding-window attention.")]
