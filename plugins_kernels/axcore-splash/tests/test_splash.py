from axcore.testing import KernelSuite
class TestSplash(KernelSuite):
    name = "splash"
    options = {"interpret": True}
    lacks = frozenset({"any_mask", "bias", "decoding", "dropout"})
