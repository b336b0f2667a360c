"""axcore-new-attention computes attention, or gives the reason why it does not."""

from axcore.testing import KernelSuite


class TestKernel(KernelSuite):
    name = "new-attention"
    options = {"block": 5}  # several blocks even in short rows, and the last one not full
    lacks = {"softcap", "sinks", "bias", "dropout"}
