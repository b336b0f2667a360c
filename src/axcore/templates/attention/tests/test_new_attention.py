"""The kernel of axcore-new-attention equals the attention formula."""

from axcore.testing import KernelSuite


class TestKernel(KernelSuite):
    name = "new-attention"
    options = {"block": 5}  # even short rows have several blocks, and the last block is not full
    lacks = {"softcap", "sinks", "bias", "dropout"}
