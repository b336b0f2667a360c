"""The grouped product of axcore-new-grouped-matmul equals float64."""

from axcore.testing import GroupedMatmulSuite


class TestInTurn(GroupedMatmulSuite):
    name = "new-grouped-matmul"
    options = {"size": 8}  # groups have several blocks, and the last one is not full
    dtypes = ("float32", "bfloat16", "float16")
    local = True
