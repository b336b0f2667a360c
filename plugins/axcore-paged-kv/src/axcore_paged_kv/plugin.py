"""What axcore-paged-kv offers. Imports neither jax nor flax."""

from axcore.plugin import KVCacheOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_kv_caches() -> list[KVCacheOffer]:
    target = "axcore_paged_kv.cache:PagedCache"
    return [KVCacheOffer("paged-kv", target, "Pages of keys and values in a pool that all rows share.")]
