"""Contract 1: one frozen `AttentionInputs`, kernels that return the log-sum-exp, and sharding that the core owns."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.contracts.attention_probes import LocalKernel, SplitKeys

import axcore as ax
from axcore.module import functional
from axcore.nn import Attention, ChooseKernel, Normal, ReferenceKernel, TokenInfo, attend, merge_by_lse
from axcore.parallel import Mesh
from axcore.testing import tiny_batch, tiny_model
from axcore.testing.attention_cases import CASES, Slopes, arrays_of, formula, inputs_of
from axcore.testing.devices import steps
from axcore.testing.models import loss_and_grads

pytestmark = pytest.mark.long

OPTIONS = {"softcap": 3.0, "scale": 0.7, "sinks": Normal(stddev=1.0), "bias": Slopes.Config(), "dropout": 0.25}


def packed(rows):
    batch = jax.tree.map(np.asarray, tiny_batch(rows=rows))
    batch["segment_ids"] = np.cumsum(np.arange(8) % 3 == 0)[None].repeat(rows, axis=0).astype(np.int32)
    return batch


@pytest.mark.parametrize("chunk", [None, 3], ids=["whole", "in chunks"])
def test_merging_two_halves_of_the_keys_equals_one_call(chunk):
    """Uses every option at once, on packed rows."""
    batch = packed(2)
    tokens = TokenInfo.of(batch["inputs"], None, batch["segment_ids"])
    x = jax.random.normal(jax.random.key(5), (2, 8, 16))

    def loss_and_grads(kernel):
        cfg = Attention.Config(input_dim=16, num_heads=4, num_kv_heads=2, kernel=kernel, **OPTIONS)
        fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))

        def loss(params, x):
            y = fn(params, state, x, tokens, key=jax.random.key(3), training=True)[0][0]
            return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)

    whole, exact = loss_and_grads(ReferenceKernel.Config())
    halves, found = loss_and_grads(SplitKeys.Config(kernel=ReferenceKernel.Config(chunk=chunk)))
    np.testing.assert_allclose(halves, whole, rtol=1e-5)
    assert float(jnp.abs(exact[0]["bias"]["slopes"]).max()) > 1e-3
    for (path, wanted), got in zip(jax.tree.leaves_with_path(exact), jax.tree.leaves(found), strict=True):
        atol = 2e-6 * max(1.0, float(jnp.abs(wanted).max()))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


def test_choose_kernel_runs_the_backward_of_the_chosen_kernel():
    class Refusing(ReferenceKernel):
        def supports(self, request):
            return "takes nothing at all"

        def backward(self, inputs, heads, lse, heads_grad):
            raise AssertionError("this kernel was not chosen")

    class Counting(ReferenceKernel):
        calls: ClassVar[list[int]] = []

        def backward(self, inputs, heads, lse, heads_grad):
            self.calls.append(inputs.keys.shape[1])
            return super().backward(inputs, heads, lse, heads_grad)

    order = ChooseKernel.Config(order=(Refusing.Config(), Counting.Config()))
    cfg = ax.select(tiny_model(), Attention).set(kernel=SplitKeys.Config(kernel=order))
    _, found = loss_and_grads(cfg, tiny_batch)
    _, exact = loss_and_grads(tiny_model(), tiny_batch)
    assert Counting.calls == [4, 4]
    jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6), found, exact)


def test_autodiff_through_merge_by_lse_is_wrong():
    """This is why kernels define `backward`: no gradient passes through the log-sum-exp."""
    case = CASES["causal"]
    arrays = arrays_of(case, "float32")
    kernel = ReferenceKernel.Config(head_dim=case.head_dim).build(rngs=ax.Rngs(0))
    heads_grad = np.random.default_rng(0).normal(size=formula(case, arrays).heads.shape)

    def by_autodiff(arrays):
        inputs = inputs_of(case, arrays, return_lse=True)
        parts = [kernel(inputs.replace(kv=inputs.plain.block(start, 8))) for start in (0, 8)]
        return (merge_by_lse(parts)[0] * heads_grad).sum()

    value, grads = jax.jit(jax.value_and_grad(by_autodiff))(arrays)
    exact = formula(case, arrays, heads_grad)
    np.testing.assert_allclose(value, (exact.heads * heads_grad).sum(), rtol=1e-5)
    assert np.abs(np.asarray(grads["q"]) - exact.grads["q"]).max() > 0.1


@pytest.mark.slow
def test_a_local_kernel_on_a_sharded_sequence_equals_one_device():
    """Uses a bias, dropout, sinks, one kv head for two tensor shards, and queries sharded over two devices."""
    attention = {"num_kv_heads": 1, **OPTIONS}
    plain = ax.select(tiny_model(), Attention).set(**attention)
    local = ax.select(plain, Attention).set(kernel=LocalKernel.Config())
    batch = packed(4)
    rules = {"batch": "data", "seq": "context", "embed": "data", "head": "tensor", "kv_head": "tensor"}
    shape = {"data": 2, "context": 2, "tensor": 2}
    (one,) = steps(plain, batch, [Mesh(shape=dict.fromkeys(shape, 1), rules=rules)])
    (eight,) = steps(local, batch, [Mesh(shape=shape, rules=rules)])
    np.testing.assert_allclose(eight["loss"], one["loss"], rtol=1e-6)
    for path, update in one["updates"].items():
        atol = 2e-6 * max(1e-2, np.abs(update).max())
        np.testing.assert_allclose(eight["updates"][path], update, rtol=0, atol=atol, err_msg=path)


def test_dropout_does_not_depend_on_chunks():
    case = CASES["dropout"]
    inputs = inputs_of(case, arrays_of(case, "float32"))
    whole, chunked = (
        ReferenceKernel.Config(head_dim=64, chunk=chunk).build(rngs=ax.Rngs(0))(inputs)[0] for chunk in (None, 5)
    )
    np.testing.assert_allclose(chunked, whole, rtol=0, atol=1e-6)


def test_an_unsupported_call_names_path_request_and_reason():
    class Narrow(ReferenceKernel):
        takes = frozenset()

        def supports(self, request):
            return None if request.head_dim == 64 else f"requires head_dim=64, got {request.head_dim}"

    def asked(**options):
        cfg = ax.select(tiny_model(), Attention).set(kernel=Narrow.Config(), **options)
        fn, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
        return jax.eval_shape(lambda ids: fn(params, state, ids), tiny_batch()["inputs"])

    request = (
        r"\(cpu, train, float32, batch=2, query_len=8, key_len=8, num_heads=4, num_kv_heads=2, head_dim=4, "
        r"mask=Causal\(\) & SameSegment\(\)\)"
    )
    reason = r"Narrow: requires head_dim=64, got 4"
    with pytest.raises(ax.ConfigError, match=rf"attention\.kernel: no kernel supports the call {request}\. {reason}"):
        asked()
    with pytest.raises(ax.ConfigError, match="Narrow: does not take softcap and sinks"):
        asked(softcap=2.0, sinks=Normal())


def test_attend_returns_the_heads_and_lse_of_a_kernel():
    case = CASES["causal"]
    kernel = ReferenceKernel.Config(head_dim=64).build(rngs=ax.Rngs(0))
    inputs = inputs_of(case, arrays_of(case, "float32"), return_lse=True)
    with ax.module.root(kernel, key=None, training=False):
        heads, lse = attend(kernel, inputs)
    expected = formula(case, arrays_of(case, "float32"))
    np.testing.assert_allclose(heads, expected.heads, rtol=0, atol=3e-5)
    np.testing.assert_allclose(lse, expected.lse, rtol=0, atol=3e-5)
