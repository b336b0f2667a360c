"""The paged cache passes the suite for paged caches, in every dtype and with several page sizes."""

import pytest

from axcore.testing import PagedCacheSuite

pytestmark = pytest.mark.long


class TestPaged(PagedCacheSuite):
    name = "paged-kv"
    options = {"page_size": 4}


@pytest.mark.slow
class TestSmallPages(PagedCacheSuite):
    """More pages than two rows require."""

    name = "paged-kv"
    options = {"page_size": 3, "num_pages": 11}


@pytest.mark.slow
class TestInt8(PagedCacheSuite):
    name = "paged-kv"
    options = {"page_size": 4, "dtype": "int8"}
    exact = 0.05


@pytest.mark.slow
class TestFloat8(PagedCacheSuite):
    name = "paged-kv"
    options = {"page_size": 2, "dtype": "float8_e4m3fn"}
    exact = 0.15
