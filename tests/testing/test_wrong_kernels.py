"""`KernelSuite` fails for kernels that are wrong in one way, and passes for the reference kernel."""

import jax
import jax.numpy as jnp
import pytest

from axcore.module import Rngs
from axcore.nn import Causal, SameSegment
from axcore.nn.attention.reference import ReferenceKernel
from axcore.testing import KernelSuite
from axcore.testing.attention_cases import CASES

from .wrong import instance, names


class Changed(ReferenceKernel):
    """Calls the reference kernel with changed inputs."""

    def change(self, inputs):
        return inputs

    def __call__(self, inputs):
        return super().__call__(self.change(inputs))


class NoScale(Changed):
    def change(self, inputs):
        return inputs.replace(scale=inputs.q.shape[-1] ** -0.5)


class NoSoftcap(Changed):
    def change(self, inputs):
        return inputs.replace(softcap=None)


class NoSinks(Changed):
    def change(self, inputs):
        return inputs.replace(sinks=None)


class NoBias(Changed):
    def change(self, inputs):
        return inputs.replace(bias=None)


class NoDropout(Changed):
    def change(self, inputs):
        return inputs.replace(dropout=None)


class NoWindow(Changed):
    def change(self, inputs):
        return inputs.replace(mask=Causal() & SameSegment())


class NoDocuments(Changed):
    def change(self, inputs):
        return inputs.replace(mask=Causal())


class NoMask(Changed):
    """Sees the key after its own, too."""

    def change(self, inputs):
        query = inputs.query
        return inputs.replace(query=type(query)(query.index + 1, query.positions, query.segment_ids, query.valid))


class Narrow(Changed):
    """Computes in bfloat16."""

    def __call__(self, inputs):
        heads, lse = super().__call__(inputs.replace(q=inputs.q.astype(jnp.bfloat16)))
        return heads.astype(inputs.q.dtype), lse


class Wide(Changed):
    """Returns float32 heads."""

    def __call__(self, inputs):
        heads, lse = super().__call__(inputs)
        return heads.astype(jnp.float32), lse


class BaseTwo(Changed):
    """Returns the log-sum-exp in base 2."""

    def __call__(self, inputs):
        heads, lse = super().__call__(inputs)
        return heads, None if lse is None else lse / jnp.log(2.0)


@jax.custom_vjp
def backward_times_1_3(x):
    return x


backward_times_1_3.defvjp(lambda x: (x, None), lambda _, g: (1.3 * g,))


class Gradients(Changed):
    """All gradients are 1.3 times too large."""

    def __call__(self, inputs):
        heads, lse = super().__call__(inputs)
        return backward_times_1_3(heads), lse


class GradientOfQueries(Changed):
    """The gradient of the queries is 1.3 times too large."""

    def change(self, inputs):
        return inputs.replace(q=backward_times_1_3(inputs.q))


class Boasts(Changed):
    """Refuses windows, which the suite expects."""

    def supports(self, request):
        return "does not support windows" if "SlidingWindow" in repr(request.mask) else None


def suite(kernel, **attributes):
    def build(self, case):
        return kernel.Config(head_dim=case.head_dim).build(rngs=Rngs(0))

    return instance(KernelSuite, name="reference", _kernel=build, **attributes)


OUTPUTS, GRADIENTS, LSE = (
    "test_outputs_equal_the_formula",
    "test_gradients_equal_the_formula",
    "test_lse_equals_the_formula",
)
SUPPORTED, MERGED = (
    "test_lacks_lists_exactly_the_unsupported_calls",
    "test_merging_two_parts_of_the_keys_equals_one_call",
)
WRONG = {
    "base two": (BaseTwo, LSE, "causal"),
    "base two, merged": (BaseTwo, MERGED, "causal"),
    "boasts": (Boasts, SUPPORTED, "window"),
    "gradient of queries": (GradientOfQueries, GRADIENTS, "causal"),
    "gradient of queries, documents": (GradientOfQueries, GRADIENTS, "documents"),
    "narrow": (Narrow, OUTPUTS, "causal"),
    "no bias": (NoBias, OUTPUTS, "bias"),
    "no documents": (NoDocuments, OUTPUTS, "documents"),
    "no dropout": (NoDropout, OUTPUTS, "dropout"),
    "no mask": (NoMask, OUTPUTS, "causal"),
    "no scale": (NoScale, OUTPUTS, "scale"),
    "no sinks": (NoSinks, OUTPUTS, "sinks"),
    "no softcap": (NoSoftcap, OUTPUTS, "softcap"),
    "no window": (NoWindow, OUTPUTS, "window"),
    "wide": (Wide, OUTPUTS, "causal"),
}
LONG = ("boasts", "gradient of queries, documents", "no window")


@pytest.mark.parametrize("name", names(WRONG, LONG))
def test_case_a_wrong_kernel_fails(name):
    kernel, check, case = WRONG[name]
    with pytest.raises(AssertionError):
        getattr(suite(kernel), check)(case)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_case_gradients_times_1_3_fail(name, dtype):
    with pytest.raises(AssertionError, match=r"the gradient of \w+ in .* roundings of its terms"):
        suite(Gradients, dtypes=(dtype,)).test_gradients_equal_the_formula(name)


@pytest.mark.long
def test_case_gradients_times_1_3_fail_in_bfloat16():
    with pytest.raises(AssertionError, match=r"the gradient of \w+ in bfloat16 .* roundings of its terms"):
        suite(Gradients, dtypes=("bfloat16",)).test_gradients_equal_the_formula("causal")
