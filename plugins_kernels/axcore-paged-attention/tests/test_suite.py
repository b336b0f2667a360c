"""The conformance suite of kernels, in the Pallas interpreter on a CPU. It shows the numerics, not those of a GPU."""

import pytest

from axcore.testing import KernelSuite


class TestPagedAttention(KernelSuite):
    """Several blocks and parts for most cases; as many queries as the cases have."""

    pytestmark = pytest.mark.slow
    name = "paged-attention"
    options = {"interpret": True, "max_queries": 512}
    phase = "decode"
    lacks = frozenset({"bias", "dropout", "gradients"})
    dtypes = ("float32", "bfloat16", "float16")


SOME = ("rows at different positions", "prefill chunk in a window")


@pytest.mark.long
@pytest.mark.parametrize("name", SOME)
def test_some_cases_equal_the_formula(name):
    TestPagedAttention().test_outputs_equal_the_formula(name)


@pytest.mark.long
@pytest.mark.parametrize("view", ["int8 pages", "rows of a cache"])
def test_views_equal_the_formula(view):
    TestPagedAttention().test_views_equal_the_formula(view)
