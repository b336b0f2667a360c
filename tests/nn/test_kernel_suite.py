"""The core's own kernel, whole and in chunks, against the suite that plugin kernels must pass."""

import jax
import numpy as np
import pytest

from axcore.testing import KernelSuite
from axcore.testing.kernel import CASES, formula


class TestReference(KernelSuite):
    name = "reference"


@pytest.mark.parametrize("name", ["causal", "odd length", "documents", "sinks and softcap", "rows at different places"])
@pytest.mark.parametrize("chunk", [1, 5])
def test_in_chunks_it_is_the_formula_too(name, chunk):
    suite = TestReference()
    suite.options = {"chunk": chunk}
    arrays, call = suite._call(CASES[name], "float32")
    expected = formula(CASES[name], [np.asarray(each, np.float64) for each in arrays])
    np.testing.assert_allclose(jax.jit(call)(*arrays), expected, rtol=0, atol=3e-5)
    every = tuple(range(len(arrays)))
    chunked = jax.jit(jax.grad(lambda *arrays: call(*arrays).sum(), argnums=every))(*arrays)
    _, whole = TestReference()._call(CASES[name], "float32")
    plain = jax.jit(jax.grad(lambda *arrays: whole(*arrays).sum(), argnums=every))(*arrays)
    for one, other in zip(chunked, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)
