"""The contract that stands for nkilib rejects wrong calls, so that the results in `test_nki.py` mean something."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.nn import Full, attend_in_parts
from axcore.testing.attention_cases import CASES, arrays_of, formula, inputs_of
from axcore_nki import calls
from axcore_nki.attention import _bounds, padded_length
from axcore_nki.kernel import NkiKernel

pytestmark = pytest.mark.long

PACKED = dataclasses.replace(
    CASES["window and documents"], query_len=300, key_len=300, kv_heads=2, head_dim=32, scale=0.3, sinks=True
)
PLAIN = dataclasses.replace(CASES["causal"], query_len=256, key_len=256, kv_heads=2, head_dim=32, scale=0.3)
CROSS = dataclasses.replace(CASES["full attention"], query_len=100, key_len=300, kv_heads=2, head_dim=32, mask=Full())


def whole(kernel, inputs):
    return kernel(inputs)


def in_parts(kernel, inputs):
    """Merges the results for two parts of the keys."""
    parts = [jax.tree.map(lambda x, at=at: x[:, at], inputs.plain) for at in (slice(120), slice(120, None))]
    with ax.module.root(kernel, key=None, training=True):
        return attend_in_parts(kernel, inputs, parts)


def check(case, attend=whole):
    """Asserts that heads, lse and gradients equal the formula in float64."""
    kernel = NkiKernel.Config(head_dim=case.head_dim).build(rngs=ax.Rngs(0))
    arrays = arrays_of(case, "bfloat16")
    grad = np.random.default_rng(5).normal(size=(2, case.query_len, case.heads, case.head_dim))
    grad = np.asarray(jnp.asarray(grad, jnp.bfloat16), np.float64)

    def scalar(arrays):
        heads, lse = attend(kernel, inputs_of(case, arrays, return_lse=True))
        return (heads.astype(jnp.float32) * grad).sum(), (heads, lse)

    try:
        grads, (heads, lse) = jax.jit(jax.grad(scalar, has_aux=True))(arrays)
        grads = {name: np.asarray(each, np.float64) for name, each in grads.items()}
    except jax.errors.JaxRuntimeError as error:  # raised by the callback
        raise AssertionError(str(error)) from error
    expected = formula(case, arrays, grad)
    np.testing.assert_allclose(np.asarray(heads, np.float64), expected.heads, rtol=0, atol=3e-2)
    np.testing.assert_allclose(lse, expected.lse, rtol=0, atol=2e-2)
    for name, exact in expected.grads.items():
        error = np.linalg.norm(grads[name] - exact) / np.linalg.norm(expected.roundings[name])
        assert error < 2**-7, f"the relative error of the gradient of {name} is {error:.2e}"


@pytest.mark.parametrize("case", [PACKED, PLAIN, CROSS], ids=["packed", "plain", "cross"])
def test_calls_equal_the_formula(nkilib, case):
    check(case)


@pytest.mark.parametrize("case", [PACKED, PLAIN], ids=["packed", "plain"])
def test_large_batches_take_several_calls(nkilib, monkeypatch, case):
    monkeypatch.setattr(calls, "LARGEST_BATCH", 4)  # one row of four heads
    check(case)


@pytest.mark.parametrize("sinks", [False, True])
def test_merged_parts_of_the_keys_equal_the_formula(nkilib, sinks):
    check(dataclasses.replace(CROSS, sinks=sinks), in_parts)


@pytest.mark.parametrize(("saved", "forward"), [((), 2), (("heads",), 2), (("heads", "lse"), 1)])
def test_saving_heads_and_lse_avoids_a_second_forward_pass(stand_in, saved, forward):
    kernel = NkiKernel.Config(head_dim=32).build(rngs=ax.Rngs(0))
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    call = jax.checkpoint(lambda arrays: kernel(inputs_of(PLAIN, arrays))[0].sum(), policy=policy)
    arrays = arrays_of(PLAIN, "bfloat16")
    text = jax.jit(jax.value_and_grad(lambda arrays: call(arrays).astype(jnp.float32))).lower(arrays).as_text()
    assert text.count("stablehlo.custom_call @xla_ffi_python_cpu_callback") == forward + 1  # and one backward


@pytest.mark.parametrize(("length", "padded"), [(1, 128), (128, 128), (129, 256), (257, 512), (512, 512), (513, 1024)])
def test_padded_lengths(length, padded):
    assert padded_length(length) == padded


@pytest.mark.parametrize("causal", [False, True])
def test_added_tokens_are_a_document_of_their_own(causal):
    """Also if the row ends with padding, whose segment id is 0."""
    ids = jnp.asarray([[1, 1, 2, 0, 0], [3, 3, 3, 3, 3]])
    q = jnp.zeros((2, 5, 1, 8))
    low, high = _bounds(calls.Form(1.0, causal, None, 1), q, q, ids)
    np.testing.assert_array_equal(low, [[0, 0, 2, 3, 3, *[5] * 123], [0] * 5 + [5] * 123])
    np.testing.assert_array_equal(high, [[2, 2, 3, 5, 5, *[128] * 123], [5] * 5 + [128] * 123])


def without(name):
    """The call with the kernel's default of an argument."""

    def change(arrays, named, static):
        return arrays, named, {key: value for key, value in static.items() if key != name}

    return change


def with_(name, value):
    return lambda arrays, named, static: (arrays, named, static | {name: value})


def lse_in_rows(arrays, named, static):
    """Token = row * columns + column, instead of column * 128 + row."""
    lse = arrays[5].swapaxes(2, 3)
    return (*arrays[:5], lse.reshape(arrays[5].shape)), named, static


def replaced(place, change):
    def changed(arrays, named, static):
        return tuple(change(x) if i == place else x for i, x in enumerate(arrays)), named, static

    return changed


def bounds(change):
    return lambda arrays, named, static: (
        arrays,
        {name: change(x) if name.startswith("bound") else x for name, x in named.items()},
        static,
    )


def bounds_of_other_rows(x):
    """For heads before rows, as if the folded dimension were [head, batch]."""
    return x.reshape(2, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


WRONG = {
    "default causal mask": (PLAIN, "attention_bwd", without("use_causal_mask")),
    "default precision": (PLAIN, "attention_bwd", without("mixed_precision")),
    "default scale": (PLAIN, "attention_bwd", without("softmax_scale")),
    "scale of q applied twice": (PLAIN, "attention_cte", with_("scale", 0.3)),
    "lse in rows": (PLAIN, "attention_bwd", lse_in_rows),
    "negated lse": (PLAIN, "attention_bwd", replaced(5, lambda lse: -lse)),
    "heads and their gradient swapped": (
        PLAIN,
        "attention_bwd",
        lambda arrays, named, static: ((*arrays[:3], arrays[4], arrays[3], arrays[5]), named, static),
    ),
    "q in float32": (PLAIN, "attention_bwd", replaced(0, lambda q: q.astype(jnp.float32))),
    "k transposed": (PLAIN, "attention_cte", replaced(1, lambda k: k.swapaxes(1, 2))),
    "no window in the backward pass": (PACKED, "attention_bwd", without("sliding_window")),
    "no window in the forward pass": (PACKED, "attention_cte", without("sliding_window")),
    "scale with a window": (PACKED, "attention_cte", with_("scale", 0.3)),
    "bounds of all rows": (PACKED, "attention_cte", bounds(lambda x: x[0])),
    "bounds of other rows": (PACKED, "attention_cte", bounds(bounds_of_other_rows)),
    "integer bounds": (PACKED, "attention_bwd", bounds(lambda x: x.astype(jnp.int32))),
    "bounds with a third axis": (PACKED, "attention_bwd", bounds(lambda x: x[..., None])),
    "no bounds": (PACKED, "attention_bwd", lambda arrays, named, static: (arrays, {}, static)),
    "no bounds of padded keys": (CROSS, "attention_cte", lambda arrays, named, static: (arrays, {}, static)),
    "sinks in bfloat16": (
        PACKED,
        "attention_cte",
        lambda arrays, named, static: (arrays, named | {"sink": named["sink"].astype(jnp.bfloat16)}, static),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_contract_rejects_wrong_calls(stand_in, monkeypatch, name):
    case, kernel, change = WRONG[name]
    call = calls._call

    def wrong(name, cores, arrays, named, **static):
        if name == kernel:
            arrays, named, static = change(arrays, named, static)
        return call(name, cores, arrays, named, **static)

    monkeypatch.setattr(calls, "_call", wrong)
    with pytest.raises(AssertionError):
        check(case)
