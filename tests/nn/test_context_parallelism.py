"""Context parallelism: attention to a sequence that is sharded over devices equals attention on one device."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from tests.nn.context_parallelism import heads_grad, results

import axcore as ax
from axcore.nn import (
    AllToAll,
    Causal,
    FeedForward,
    KernelRequest,
    LatentAttention,
    ReferenceKernel,
    RingAttention,
    SameSegment,
    SlidingWindow,
    TransformerLayer,
    attend,
    use_remat,
)
from axcore.nn.attention.context.hops import hops_of
from axcore.nn.choosing import recording
from axcore.parallel import ByTag, Mesh, Remat
from axcore.plugin import PluginError
from axcore.testing import tiny_batch, tiny_model
from axcore.testing.attention_cases import CASES, arrays_of, formula, inputs_of
from axcore.testing.devices import on_devices, steps
from axcore.testing.models import OBJECTIVE
from axcore.train import Learner, Trainer

STRATEGIES = {
    "all-to-all": AllToAll.Config(),
    "ring": RingAttention.Config(),
    "unbalanced ring": RingAttention.Config(balanced=False),
}
SHORT = {"all-to-all": ("documents",), "ring": ("documents",)}
LONG = (
    "causal",
    "documents",
    "full attention",
    "window",
    "window and documents",
    "union of two masks",
    "two heads per kv head",
    "one kv head",
    "value_dim 32",
    "sinks and softcap",
    "bias",
    "dropout",
)
ONE_AXIS = {"context": 4}
THREE_AXES = {"data": 2, "context": 2, "tensor": 2}


def calls(names, shapes):
    return tuple(
        (case, Mesh(shape=shape, context=STRATEGIES[strategy]))
        for strategy in names
        for case in names[strategy]
        for shape in shapes
    )


def check(calls):
    for (name, mesh), found in zip(calls, on_devices(results, calls), strict=True):
        case = CASES[name]
        arrays = arrays_of(case, "float32")
        exact = formula(case, arrays, heads_grad(case))
        for field, wanted in {"heads": exact.heads, "lse": exact.lse, **exact.grads}.items():
            error = np.abs(found[field] - wanted).max() / np.abs(wanted).max()
            assert error < 1e-5, f"{name} on {mesh}: relative error {error} of {field}"


@pytest.mark.long
def test_heads_and_gradients_equal_the_formula():
    check(calls(SHORT, [ONE_AXIS]))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", [ONE_AXIS, THREE_AXES], ids=["one axis", "three axes"])
def test_case_heads_and_gradients_equal_the_formula(strategy, shape):
    check(calls({strategy: LONG}, [shape]))


def requests_of(case, mesh, kernel=ReferenceKernel, **changes):
    """The kernel requests of a call, which is traced on a mesh without devices."""
    built = kernel.Config(head_dim=64).build(rngs=ax.Rngs(0))

    def call(arrays):
        inputs = inputs_of(case, arrays).replace(**changes)
        with ax.module.root(built, key=None, training=True):
            return attend(built, inputs)

    with mesh.abstract(math.prod(mesh.shape.values()), "cpu").active(), recording() as choices:
        jax.eval_shape(call, arrays_of(case, "float32"))
    return choices[0].requests


def test_the_kernel_sees_whole_rows_and_some_heads():
    (request,) = requests_of(CASES["one kv head"], Mesh(shape=THREE_AXES, context=AllToAll.Config()))
    assert (request.batch, request.query_len, request.key_len) == (1, 16, 16)
    assert (request.num_heads, request.num_kv_heads, request.aligned) == (1, 1, True)
    (gathered,) = requests_of(CASES["one kv head"], Mesh(shape=THREE_AXES))
    assert (gathered.query_len, gathered.key_len, gathered.num_heads, gathered.aligned) == (8, 16, 2, False)


def test_ring_attention_requests_a_causal_mask_only_where_queries_and_keys_are_the_same_tokens():
    causal, same_segment, union = CASES["documents"].mask, SameSegment(), CASES["union of two masks"].mask
    ring = Mesh(shape={"context": 4}, context=RingAttention.Config())
    unbalanced = ring.set(context=RingAttention.Config(balanced=False))

    def calls(name, mesh):
        return [(each.query_len, each.key_len, each.mask, each.aligned) for each in requests_of(CASES[name], mesh)]

    halves = [
        (2, 2, causal, True),
        (2, 2, same_segment, False),
        (4, 2, same_segment, False),
        (2, 4, same_segment, False),
    ]
    assert calls("documents", ring) == halves
    assert calls("documents", unbalanced) == [(4, 4, causal, True), (4, 4, same_segment, False)]
    assert calls("union of two masks", ring) == [(4, 4, union, True), (4, 4, union, False)]
    assert calls("window of one", ring) == [(4, 4, CASES["window of one"].mask, True)]
    assert requests_of(CASES["sinks"], ring)[0].options == ("lse",)


@pytest.mark.parametrize(("window", "hops"), [(1, 1), (2, 2), (5, 2), (6, 3), (13, 4), (100, 4)])
def test_a_window_limits_the_hops(window, hops):
    mask = Causal() & SlidingWindow(size=window)
    case = dataclasses.replace(CASES["window"], mask=mask, query_len=4, key_len=4)
    assert len(hops_of(KernelRequest.of(inputs_of(case, arrays_of(case, "float32"))), 4, balanced=False)) == hops
    queries, keys = np.arange(12, 16)[:, None], np.arange(16)
    visible = (queries >= keys) & (queries - keys < window)
    assert visible.any(0).reshape(4, 4).any(1).sum() == hops


def test_a_policy_that_saves_heads_and_lse_avoids_recomputing_the_forward_pass():
    case, mesh = CASES["causal"], Mesh(shape={"context": 2}, context=RingAttention.Config(balanced=False))
    kernel = ReferenceKernel.Config(head_dim=64).build(rngs=ax.Rngs(0))

    def num_products(policy):
        @functools.partial(jax.checkpoint, policy=policy.policy())
        def call(arrays):
            with ax.module.root(kernel, key=None, training=True):
                return attend(kernel, inputs_of(case, arrays))[0]

        with mesh.abstract(2, "cpu").active():
            traced = jax.make_jaxpr(jax.grad(lambda arrays: call(arrays).sum()))(arrays_of(case, "float32"))
        return str(traced).count("dot_general[")

    assert num_products(Remat()) - num_products(ByTag(save=("heads", "lse"))) == 4  # two in each hop


def test_calls_that_a_strategy_cannot_compute_raise_before_compiling():
    three = Mesh(shape={"context": 3}, context=AllToAll.Config())
    wide = dataclasses.replace(CASES["causal"], query_len=18, key_len=18)
    message = r"mesh\.context=AllToAll with context=3 requires the heads of a device to be a multiple of 3, got 4"
    with pytest.raises(ax.ConfigError, match=message + r"\. Shard the sequence over 1, 2, 4 devices"):
        requests_of(wide, three)
    four = Mesh(shape={"context": 4}, context=AllToAll.Config())
    message = r"RingAttention with context=4 and balanced=True requires an even number of tokens on each device, got 3"
    odd, ring = dataclasses.replace(CASES["causal"], query_len=12, key_len=12), RingAttention.Config()
    with pytest.raises(ax.ConfigError, match=message + r"\. Make the sequence length a multiple of 8"):
        requests_of(odd, four.set(context=ring))
    for name, phase in (("prefill chunk", "prefill"), ("one decoded token", "decode")):
        with pytest.raises(ax.ConfigError, match=r"does not read a KV cache\. Set mesh\.context=None for decoding"):
            requests_of(CASES[name], four, phase=phase)
    with pytest.raises(ax.ConfigError, match="a number of keys that is a multiple of 4, got 15"):
        requests_of(dataclasses.replace(CASES["full attention"], key_len=15), four)
    requests_of(CASES["one decoded token"], Mesh(shape={"context": 1}, context=AllToAll.Config()), phase="decode")


def test_the_feature_takes_devices_from_another_axis():
    cfg = Trainer.Config(model=tiny_model(), objective=OBJECTIVE, learner=Learner.Config(), steps=1)

    def mesh_of(shape, **options):
        return ax.pipe(cfg.set(mesh=Mesh(shape=shape)), ax.use("context", **options)).mesh

    assert mesh_of({"data": -1}, size=2) == Mesh(shape={"data": -1, "context": 2}, context=AllToAll.Config())
    assert mesh_of({"data": 2, "fsdp": 8}, size=4, strategy=None) == Mesh(shape={"data": 2, "fsdp": 2, "context": 4})
    assert mesh_of({"data": 4, "context": 2}, size=4).shape == {"data": 2, "context": 4}
    with pytest.raises(ax.ConfigError, match="the axis 'context' of size 2 takes its devices from fsdp or data"):
        mesh_of({"data": 3}, size=2)
    with pytest.raises(ax.ConfigError, match="only the config of a trainer has a mesh"):
        ax.pipe(tiny_model(), ax.use("context", size=2))
    with pytest.raises(PluginError, match="no installed plugin offers the context parallelism 'al-to-all'"):
        ax.pipe(cfg, ax.use("context", size=2, strategy="al-to-all"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_case_a_step_of_a_model_equals_one_device(strategy):
    """Latent attention, a window in one of two layers, remat, packed rows and dropout, on three mesh axes."""
    latent = LatentAttention.Config(
        num_heads=4, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, value_dim=4, dropout=0.25
    )
    layer = TransformerLayer.Config(attention=latent, ffn=FeedForward.Config(hidden_dim=24))
    model = ax.select(tiny_model(), "decoder").set(layers=layer)
    model = ax.pipe(model, ax.use("sliding-window", size=3, global_every=2))
    batch = jax.tree.map(np.asarray, tiny_batch(rows=4, seq=16))
    batch["segment_ids"] = np.cumsum(np.arange(16) % 5 == 0)[None].repeat(4, axis=0).astype(np.int32)
    meshes = [Mesh(shape=dict.fromkeys(THREE_AXES, 1)), Mesh(shape=THREE_AXES, context=STRATEGIES[strategy])]
    one, eight = steps(use_remat(model, Remat()), batch, meshes, OBJECTIVE)
    np.testing.assert_allclose(eight["loss"], one["loss"], rtol=1e-6)
    for path, update in one["updates"].items():
        error = np.abs(eight["updates"][path] - update).max() / np.abs(update).max()
        assert error < 1e-5, f"{path}: {error}"
