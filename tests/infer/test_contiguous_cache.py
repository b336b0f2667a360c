"""The core's own KV cache against the suite that plugin caches must pass."""

from axcore.testing import KVCacheSuite


class TestContiguous(KVCacheSuite):
    name = "contiguous"


class TestContiguousUnderAWindow(KVCacheSuite):
    """Nothing is forgotten here; the mask alone hides what is too old."""

    name = "contiguous"
    window = 3

    def test_more_than_max_len_is_not_lost_without_a_word(self):
        found = self._decoded((self.max_len, 1), self.max_len + 1)
        assert (found[:, -1] != found[:, -1]).all()
