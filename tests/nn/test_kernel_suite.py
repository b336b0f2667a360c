"""The core's own kernel, whole and in chunks, against the suite that plugin kernels must pass."""

from axcore.testing import KernelSuite


class TestReference(KernelSuite):
    name = "reference"


class TestReferenceInChunks(KernelSuite):
    name = "reference"
    options = {"chunk": 5}
