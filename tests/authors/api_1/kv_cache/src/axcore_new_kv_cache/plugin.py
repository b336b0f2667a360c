"""What axcore-new-kv-cache offers. Imports neither jax nor flax."""

from axcore.plugin import KVCache, hookimpl

axcore_api = 1


@hookimpl
def axcore_kv_caches() -> list[KVCache]:
    target = "axcore_new_kv_cache.ring:RingCache"
    return [KVCache("new-kv-cache", target, "The last tokens only, for attention in a sliding window.")]
