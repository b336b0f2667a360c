"""The kernel of the core, with and without chunks, passes the suite for plugin kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore.nn import InCache
from axcore.nn.attention.formula import logits
from axcore.testing import KernelSuite
from axcore.testing.attention_cases import CASES, arrays_of, formula, inputs_of

pytestmark = pytest.mark.long


class TestReference(KernelSuite):
    name = "reference"


@pytest.mark.parametrize(
    "name", ["causal", "odd length", "documents", "sinks and softcap", "dropout", "rows at different positions"]
)
@pytest.mark.parametrize("chunk", [1, 5])
def test_chunked_results_equal_the_formula(name, chunk):
    suite, case = TestReference(), CASES[name]
    suite.options = {"chunk": chunk}
    arrays, call = suite._call(case, "float32")
    np.testing.assert_allclose(jax.jit(call)(arrays), formula(case, arrays).heads, rtol=0, atol=3e-5)
    suite._check_gradients(case, "float32", arrays, call)


@pytest.mark.parametrize("name", [name for name in CASES if name != "longer than a block"])
def test_blocks_are_read_from_a_cache_of_all_layers(name):
    """The last block overlaps the one before it, and the rows are in other slots."""
    suite, case = TestReference(), CASES[name]
    suite.options = {"block": 5}
    arrays = arrays_of(case, "float32")
    inputs = inputs_of(case, arrays, return_lse=True)
    kv, slots = inputs.plain, jnp.asarray([2, 0])
    stacked = [jnp.zeros((3, 4, *x.shape[1:])).at[1, slots].set(x) for x in (kv.k, kv.v)]
    view = InCache(*stacked, kv.tokens, (jnp.int32(1),), slots)
    assert (view.shape, view.value_dim) == (kv.shape, kv.value_dim)
    heads, lse = jax.jit(suite._kernel(case).__call__)(inputs.replace(kv=view))
    expected = formula(case, arrays)
    np.testing.assert_allclose(heads, expected.heads, rtol=0, atol=3e-5)
    np.testing.assert_allclose(lse, expected.lse, rtol=0, atol=3e-5)


def test_case_logits_of_bfloat16_are_exact_to_float32():
    """Scaling the queries first would round them, with an error of 1.7e-3."""
    case = dataclasses.replace(CASES["full attention"], scale=0.3)
    inputs = inputs_of(case, arrays_of(case, "bfloat16"))
    q, k = (np.asarray(x, np.float64) for x in (inputs.q, inputs.plain.k))
    exact = 0.3 * np.einsum("bshd,bthd->bhst", q, k)
    assert np.sqrt(np.mean((np.asarray(logits(inputs, inputs.plain)) - exact) ** 2)) < 1e-6
