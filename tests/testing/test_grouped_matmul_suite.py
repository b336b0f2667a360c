"""`GroupedMatmulSuite` passes for the core's grouped products, and fails for each kind of error."""

import functools

import jax
import jax.numpy as jnp
import pytest

from axcore.config import ConfigError
from axcore.nn import Blocks, GroupedRequest
from axcore.testing import GroupedMatmulSuite

from .wrong import instance


@pytest.mark.long
class TestBlocks(GroupedMatmulSuite):
    name = "blocks"
    dtypes = ("float32", "bfloat16", "float16")


@pytest.mark.slow
class TestBlocksOfThree(TestBlocks):
    options = {"size": 3}


@pytest.mark.slow
class TestRaggedDot(GroupedMatmulSuite):
    name = "ragged-dot"
    dtypes = ("float32", "bfloat16", "float16")


class Right(Blocks):
    """Supports multiples of 4 features and 32-bit or bfloat16 rows on one device."""

    def supports(self, request):
        if request.dtype == jnp.float16:
            return "does not multiply float16"
        if request.sharded:
            return "requires the rows of one device"
        for features in (request.input_dim, request.output_dim):
            if features % 4:
                return f"requires multiples of 4 features, got {features}"
        return None

    def __call__(self, x, matrices, sizes, group, accumulate=None):
        if reason := self.supports(GroupedRequest.of(x.dtype, *matrices.shape[1:])):
            raise ConfigError(reason)
        return super().__call__(x, matrices, sizes, group, accumulate)


def product(function):
    """A class whose product is `function(right, x, matrices, sizes, group, accumulate)`."""

    class Made(Right):
        def __call__(self, x, matrices, sizes, group, accumulate=None):
            right = functools.partial(Blocks.__call__, self)
            return function(right, x, matrices, sizes, group, accumulate)

    return Made


def with_gradient(change):
    """A correct product, the gradients of which are changed by `change(x_bar, w_bar, sizes)`."""

    def function(right, x, matrices, sizes, group, accumulate):
        @jax.custom_vjp
        def call(x, matrices, sizes, group):
            return right(x, matrices, sizes, group, accumulate)

        def forward(*args):
            return call(*args), args

        def backward(args, g):
            x_bar, w_bar = jax.vjp(lambda x, w: right(x, w, *args[2:], accumulate), *args[:2])[1](g)
            return *change(x_bar, w_bar, args[2]), None, None

        call.defvjp(forward, backward)
        return call(x, matrices, sizes, group)

    return product(function)


def narrow_sums(right, x, matrices, sizes, group, accumulate):
    """Adds up two halves of the products in the dtype of x, eight times."""
    parts = [slice(start, start + 4) for start in range(0, x.shape[1], 4)]
    total = right(x[:, parts[0]], matrices[:, parts[0]], sizes, group, None)
    for part in parts[1:]:
        total = total + right(x[:, part], matrices[:, part], sizes, group, None)
    return total.astype(accumulate or x.dtype)


def concrete_sizes(right, x, matrices, sizes, group, accumulate):
    return right(x[: int(sizes.sum())], matrices, sizes, group, accumulate)


def centered(right, x, matrices, sizes, group, accumulate):
    """Rows of all groups change the result, a little."""
    return right(x + (1e-6 * x.mean()).astype(x.dtype), matrices, sizes, group, accumulate)


class EveryDtype(Right):
    def supports(self, request):
        return None if request.dtype == jnp.float16 else super().supports(request)


class EverySize(Right):
    def supports(self, request):
        return None if request.input_dim % 4 else super().supports(request)


class ShortReason(Right):
    def supports(self, request):
        return super().supports(request) and "no"


class Sharded(Right):
    def supports(self, request):
        return None if request.sharded else super().supports(request)


class OtherOuter(Right):
    def outer(self, x, y, sizes, group, accumulate=None):
        return 2 * super().outer(x, y, sizes, group, accumulate)


class FirstOnly(Right):
    """`each` loses the gradient of the second product."""

    def each(self, x, several, sizes, group, accumulate=None):
        rows = (x, *[jax.lax.stop_gradient(x)] * (len(several) - 1))
        return tuple(self(x, w, sizes, group, accumulate) for x, w in zip(rows, several, strict=True))


WRONG = {
    "one matrix": (
        product(lambda right, x, w, sizes, group, a: right(x, w[:1].repeat(len(w), 0), sizes, group, a)),
        ("test_products_equal_float64", "uneven groups"),
    ),
    "next matrix": (
        product(lambda right, x, w, sizes, group, a: right(x, jnp.roll(w, 1, 0), sizes, group, a)),
        ("test_products_equal_float64", "all rows in the last group"),
    ),
    "sums in 16 bits": (product(narrow_sums), ("test_products_of_long_sums_are_exact",)),
    "rounded wide sums": (
        product(lambda right, x, w, sizes, group, a: right(x, w, sizes, group).astype(a or x.dtype)),
        ("test_wide_sums_are_not_rounded",),
    ),
    "concrete sizes": (product(concrete_sizes), ("test_products_equal_float64", "equal groups")),
    "rows of other groups": (product(centered), ("test_groups_do_not_change_each_other",)),
    "x gradient 1% too large": (
        with_gradient(lambda x, w, sizes: ((1.01 * x).astype(x.dtype), w)),
        ("test_gradients_equal_float64", "equal groups"),
    ),
    "no gradient of matrices": (
        with_gradient(lambda x, w, sizes: (x, 0 * w)),
        ("test_gradients_equal_float64", "one group"),
    ),
    "gradient of empty groups": (
        with_gradient(lambda x, w, sizes: (x, jnp.where((sizes == 0)[:, None, None], w[-2:-1], w))),
        ("test_gradients_equal_float64", "empty groups"),
    ),
    "NaN without rows": (
        with_gradient(lambda x, w, sizes: (x, w / (sizes.sum() > 0))),
        ("test_gradients_equal_float64", "no rows"),
    ),
    "every dtype": (EveryDtype, ("test_supports_exactly_the_declared_dtypes", "float16")),
    "every size": (EverySize, ("test_features_that_do_not_divide_are_refused_with_their_number",)),
    "short reason": (ShortReason, ("test_supports_exactly_the_declared_dtypes", "float16")),
    "sharded": (Sharded, ("test_sharded_rows_are_refused_exactly_if_local",)),
    "other outer": (OtherOuter, ("test_outer_products_equal_float64", "float32")),
    "gradient of one product": (FirstOnly, ("test_several_stacks_of_matrices_add_up_the_gradients_of_x",)),
}


def suite(cls):
    return instance(
        GroupedMatmulSuite, dtypes=("bfloat16", "float32"), multiple=4, local=True, matmul=lambda self: cls(size=8)
    )


@pytest.mark.long
@pytest.mark.parametrize("name", WRONG)
def test_case_a_wrong_grouped_product_fails(name):
    cls, (check, *arguments) = WRONG[name]
    with pytest.raises((AssertionError, jax.errors.ConcretizationTypeError)):
        getattr(suite(cls), check)(*arguments)


@pytest.mark.long
@pytest.mark.parametrize("check", dict.fromkeys(check for _, check in WRONG.values()), ids="-".join)
def test_case_a_correct_grouped_product_passes(check):
    getattr(suite(Right), check[0])(*check[1:])
