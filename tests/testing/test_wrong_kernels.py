"""`KernelSuite` fails for kernels that are wrong in one way, and passes for the reference kernel."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore.module import Rngs
from axcore.nn import Causal, SameSegment, SlidingWindow, visible
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


class NarrowWindow(Changed):
    """Windows are one key too small."""

    def change(self, inputs):
        return inputs.replace(mask=Causal() & SlidingWindow(size=4))


class NoPrefix(Changed):
    def change(self, inputs):
        return inputs.replace(mask=Causal())


class SinksOutsideLse(Changed):
    """The log-sum-exp does not include the sinks."""

    def __call__(self, inputs):
        return super().__call__(inputs)[0], super().__call__(inputs.replace(sinks=None))[1]


class EmptyRows(Changed):
    """Divides by zero for a query that sees no key."""

    def __call__(self, inputs):
        heads, lse = super().__call__(inputs.replace(return_lse=True))
        seen = lse > -1e30
        return jnp.where(seen[..., None], heads, jnp.nan), jnp.where(seen, lse, 0.0) if inputs.return_lse else None


class WrongPages(Changed):
    """Reads pages in the order of the pool."""

    def __call__(self, inputs):
        kv = inputs.kv
        if hasattr(kv, "table"):
            inputs = inputs.replace(kv=dataclasses.replace(kv, table=jnp.sort(kv.table)))
        return super().__call__(inputs)


class NoScales(Changed):
    """Reads int8 codes without their scales."""

    def __call__(self, inputs):
        kv = inputs.kv
        if getattr(kv, "scales", None) is not None:
            inputs = inputs.replace(kv=dataclasses.replace(kv, scales=None))
        return super().__call__(inputs)


@jax.custom_vjp
def scaled_backward(x, factors):
    return x


scaled_backward.defvjp(lambda x, factors: (x, factors), lambda factors, g: ((factors * g).astype(g.dtype), None))


class Gradients(Changed):
    """All gradients are 1.05 times too large."""

    def __call__(self, inputs):
        heads, lse = super().__call__(inputs)
        return scaled_backward(heads, 1.05), lse


class GradientOfQueries(Changed):
    """The gradient of the queries is 1.05 times too large."""

    def change(self, inputs):
        return inputs.replace(q=scaled_backward(inputs.q, 1.05))


class GradientOfKeys(Changed):
    """The gradient of the keys is 1.05 times too large."""

    factors = 1.05

    def change(self, inputs):
        kv = inputs.plain
        return inputs.replace(kv=dataclasses.replace(kv, k=scaled_backward(kv.k, self.factors)))


class GradientOfOneHead(GradientOfKeys):
    """The gradient of the keys is 1.02 times too large in one head."""

    factors = np.array([1.0, 1.02, 1.0, 1.0])[:, None]


@jax.custom_vjp
def reversed_backward(x):
    return x


reversed_backward.defvjp(lambda x: (x, None), lambda _, g: (g[:, :, ::-1],))


class WrongGroup(Changed):
    """The gradients of the keys are those of the other kv head."""

    def change(self, inputs):
        kv = inputs.plain
        return inputs.replace(kv=dataclasses.replace(kv, k=reversed_backward(kv.k)))


@jax.custom_vjp
def value_of(value, derivative):
    return value


value_of.defvjp(lambda value, derivative: (value, None), lambda _, g: (None, g))


class Backward(Changed):
    """The backward pass is that of changed inputs."""

    def __call__(self, inputs):
        heads, lse = ReferenceKernel.__call__(self, inputs)
        return value_of(heads, ReferenceKernel.__call__(self, self.change(inputs))[0]), lse


class NoDocumentsBackward(Backward, NoDocuments):
    pass


class OtherDropoutBackward(Backward):
    def change(self, inputs):
        key = jax.random.fold_in(inputs.dropout.key, 1)
        return inputs.replace(dropout=dataclasses.replace(inputs.dropout, key=key))


class NoSoftcapDerivative(Changed):
    """The backward pass of a call without kv groups omits the derivative of tanh."""

    def __call__(self, inputs):
        kv, cap = inputs.plain, inputs.softcap
        logits = jnp.einsum("bshd,bthd->bhst", inputs.q, kv.k, preferred_element_type=jnp.float32) * inputs.scale
        logits = value_of(cap * jnp.tanh(logits / cap), logits)
        seen = visible(inputs.mask, inputs.query, kv.tokens)[:, None]
        weights = jax.nn.softmax(logits, where=seen).astype(kv.v.dtype)
        return jnp.einsum("bhst,bthd->bshd", weights, kv.v), None


class RoundsFactors(Changed):
    """Not wrong: rounds the factors of each product to the dtype of q, as kernels on matrix units do."""

    def __call__(self, inputs):
        def products(q, k, v):
            logits = jnp.einsum("bshd,bthd->bhst", q, k, preferred_element_type=jnp.float32) * inputs.scale
            weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf))
            return weights, jnp.einsum("bhst,bthd->bshd", weights.astype(q.dtype), v)

        @jax.custom_vjp
        def heads(q, k, v):
            return products(q, k, v)[1]

        def backward(kept, heads_grad):
            q, k, v, weights, out = kept
            of_weights = jnp.einsum("bshd,bthd->bhst", heads_grad, v, preferred_element_type=jnp.float32)
            along = (out.astype(jnp.float32) * heads_grad.astype(jnp.float32)).sum(-1).swapaxes(1, 2)[..., None]
            of_logits = (weights * (of_weights - along) * inputs.scale).astype(q.dtype)
            weights = weights.astype(q.dtype)
            return (
                jnp.einsum("bhst,bthd->bshd", of_logits, k),
                jnp.einsum("bhst,bshd->bthd", of_logits, q),
                jnp.einsum("bhst,bshd->bthd", weights, heads_grad),
            )

        def forward(q, k, v):
            weights, out = products(q, k, v)
            return out, (q, k, v, weights, out)

        heads.defvjp(forward, backward)
        kv = inputs.plain
        seen = visible(inputs.mask, inputs.query, kv.tokens)[:, None]
        group = inputs.q.shape[2] // kv.k.shape[2]
        return heads(inputs.q, jnp.repeat(kv.k, group, axis=2), jnp.repeat(kv.v, group, axis=2)), None


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
SUPPORTED, MERGED, SEEN = (
    "test_lacks_lists_exactly_the_unsupported_calls",
    "test_merging_two_parts_of_the_keys_equals_one_call",
    "test_views_equal_the_formula",
)
DOCUMENTS, EMPTY = "test_documents_do_not_change_each_other", "test_a_query_without_keys_gives_finite_numbers"
WRONG = {
    "base two": (BaseTwo, LSE, "causal"),
    "base two, merged": (BaseTwo, MERGED, "causal"),
    "boasts": (Boasts, SUPPORTED, "window"),
    "documents, backward": (NoDocumentsBackward, GRADIENTS, "documents"),
    "documents, backward, others change": (NoDocumentsBackward, DOCUMENTS, None),
    "documents, others change": (NoDocuments, DOCUMENTS, None),
    "dropout, backward": (OtherDropoutBackward, GRADIENTS, "dropout"),
    "empty rows": (EmptyRows, EMPTY, None),
    "gradient of keys": (GradientOfKeys, GRADIENTS, "causal"),
    "gradient of one head": (GradientOfOneHead, GRADIENTS, "causal"),
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
    "no prefix": (NoPrefix, OUTPUTS, "prefix"),
    "no scales": (NoScales, SEEN, "int8 pages"),
    "no softcap derivative": (NoSoftcapDerivative, GRADIENTS, "softcap"),
    "no window": (NoWindow, OUTPUTS, "window"),
    "sinks outside lse": (SinksOutsideLse, LSE, "sinks"),
    "smaller window": (NarrowWindow, OUTPUTS, "window"),
    "wide": (Wide, OUTPUTS, "causal"),
    "wrong group": (WrongGroup, GRADIENTS, "two heads per kv head"),
    "wrong pages": (WrongPages, SEEN, "pages"),
}
LONG = ("boasts", "documents, backward, others change", "empty rows", "gradient of one head", "smaller window")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", names(WRONG, LONG))
def test_case_a_wrong_kernel_fails(name, dtype):
    kernel, check, case = WRONG[name]
    arguments = () if case is None else (case,)
    if (kernel, dtype) in ((Narrow, "bfloat16"), (Wide, "float32")):  # such a kernel is right in this dtype
        getattr(suite(kernel, dtypes=(dtype,)), check)(*arguments)
        return
    with pytest.raises(AssertionError):
        getattr(suite(kernel, dtypes=(dtype,)), check)(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_case_gradients_times_1_05_fail(name, dtype):
    with pytest.raises(AssertionError, match=r"the gradient of \w+ in .* roundings of its terms"):
        suite(Gradients, dtypes=(dtype,)).test_gradients_equal_the_formula(name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name == "two heads per kv head" else pytest.mark.slow)
        for name, case in CASES.items()
        if not set(case.needs) & {"softcap", "sinks", "bias", "dropout", "decoding"}
    ],
)
def test_case_a_kernel_that_rounds_its_factors_passes(name):
    kernel = suite(RoundsFactors, dtypes=("bfloat16", "float16", "float32"))
    kernel.test_outputs_equal_the_formula(name)
    kernel.test_gradients_equal_the_formula(name)
