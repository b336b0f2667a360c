"""cuDNN calls in programs that XLA compiles for H100, without a GPU."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import axcore as ax
from axcore.aot import Target
from axcore.infer import Decoder, Step
from axcore.nn import Attention, Causal, ContiguousCache, Full, KernelRequest, Prefix, SameSegment, refusal
from axcore.parallel import Mesh
from axcore.testing import tiny_model
from axcore.testing.attention_cases import Case, arrays_of, inputs_of
from axcore_cudnn.fp8_kernel import CudnnFp8Kernel
from axcore_cudnn.kernel import CudnnKernel

pytestmark = pytest.mark.slow
pytest.importorskip("jax_plugins.xla_cuda13")


def program(kernel, case, gradient=True):
    """The optimized HLO of the heads, and of the gradients of q, k and v."""
    layout = Mesh(shape={"data": 1}, rules={}).make([Target.of("gpu-h100-1").devices()[0]])
    sharding = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec())
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for name, x in arrays_of(case, "bfloat16").items()
    }

    def heads(arrays, segment_ids):
        inputs = inputs_of(case, arrays)
        if case.segments:  # as an argument, because XLA would remove the branches that constants do not take
            tokens = dataclasses.replace(inputs.query, segment_ids=segment_ids)
            inputs = inputs.replace(query=tokens, kv=dataclasses.replace(inputs.plain, tokens=tokens))
        request = dataclasses.replace(KernelRequest.of(inputs), platform="gpu")
        assert refusal(kernel, request) is None
        with ax.module.root(kernel, key=None, training=gradient):
            return kernel(inputs)[0].astype(jnp.float32).sum()

    ids = jax.ShapeDtypeStruct((2, case.key_len), jnp.int32, sharding=sharding)
    with layout.active():
        lowered = jax.jit(jax.value_and_grad(heads) if gradient else heads).lower(shapes, ids)
        return lowered.compile({"xla_gpu_enable_triton_gemm": False}).as_text()


def calls(kernel, case, gradient=True):
    """The number of cuDNN calls of each kind."""
    found = re.findall(r'custom_call_target="__cudnn\$(\w+)"', program(kernel, case, gradient))
    return {name: found.count(name) for name in set(found)}


def built(kind, head_dim):
    return kind.Config(head_dim=head_dim).build(rngs=ax.Rngs(0))


ROW = Case(query_len=256, key_len=256, heads=8, kv_heads=2, head_dim=128)
DECODED = dataclasses.replace(ROW, query_len=1, start=200, written=201, behind=90)
PLAIN = {"fmhaSoftmax": 1, "fmhaSoftmaxBackward": 1}
BIAS = {"fmhaScaleBiasSoftmax": 1, "fmhaScaleBiasSoftmaxBackward": 1}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (ROW, PLAIN),
        (dataclasses.replace(ROW, head_dim=256), PLAIN),
        (dataclasses.replace(ROW, head_dim=192, value_dim=128), PLAIN),
        (dataclasses.replace(ROW, mask=Full(), query_len=64), PLAIN),
        (dataclasses.replace(ROW, mask=(Causal() | Prefix(size=9)) & SameSegment()), BIAS),
        (DECODED, {"fmhaSoftmax": 1, "fmhaScaleBiasSoftmaxBackward": 1}),
        (dataclasses.replace(DECODED, query_len=33, start=168, behind=0), BIAS),
    ],
    ids=["causal", "head_dim 256", "value_dim 128", "cross", "prefix", "one decoded token", "prefill chunk"],
)
def test_each_pass_is_one_call(case, expected):
    assert calls(built(CudnnKernel, case.head_dim), case) == expected


def test_packed_rows_have_calls_for_one_few_and_many_documents():
    case = dataclasses.replace(ROW, mask=Causal() & SameSegment(), segments=True)
    assert calls(built(CudnnKernel, 128), case) == {
        "fmhaSoftmax": 2,
        "fmhaSoftmaxBackward": 2,
        "fmhaScaleBiasSoftmax": 1,
        "fmhaScaleBiasSoftmaxBackward": 1,
    }


@pytest.mark.parametrize("mask", [Causal(), Full()], ids=repr)
def test_fp8_attention_is_one_fp8_call(mask):
    case = dataclasses.replace(ROW, mask=mask)
    assert calls(built(CudnnFp8Kernel, 128), case, gradient=False) == {"fmhaSoftmaxF8": 1}


def test_a_decoded_token_has_neither_a_bias_nor_a_copy_of_keys():
    case = dataclasses.replace(DECODED, heads=32, kv_heads=8, key_len=4096)
    text = program(built(CudnnKernel, 128), case, gradient=False)
    assert re.findall(r'custom_call_target="__cudnn\$(\w+)"', text) == ["fmhaSoftmax"]
    keys = re.findall(r"%(\S+) = bf16\[2,4096,8,128\]\S* (\w+)\(", text)
    assert {kind for _, kind in keys} == {"parameter"}


def test_a_decoding_step_of_all_slots_reads_and_writes_its_caches_in_place():
    """Each cache is an argument, and the result of the scatter that writes the new tokens; nothing else is as large."""
    cfg = ax.pipe(tiny_model(), ax.use("cudnn")).set(dtypes=ax.DTypes(compute=jnp.bfloat16))
    cfg = ax.select(cfg, Attention).set(num_heads=8, num_kv_heads=2, head_dim=128)
    decoder, params, state = Decoder.of(
        cfg.build(rngs=ax.Rngs(0)), cache=ContiguousCache.Config(), batch_size=8, max_len=1024
    )
    layout = Mesh(shape={"data": 1}, rules={}).make([Target.of("gpu-h100-1").devices()[0]])
    sharding = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec())
    step = Step(jnp.zeros((8, 1), jnp.int32), start=jnp.zeros(8, jnp.int32), lengths=jnp.ones(8, jnp.int32))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (params, state, step))
    with layout.active():
        lowered = jax.jit(decoder, donate_argnums=1).lower(*shapes)
        text = lowered.compile({"xla_gpu_enable_triton_gemm": False}).as_text()
    entry = text[text.index("ENTRY") :]
    assert re.findall(r'custom_call_target="__cudnn\$(\w+)"', entry) == ["fmhaSoftmax"] * 2
    whole = re.findall(r"%(\w+)\S* = bf16\[8,1024,2,128\]\S* (\w+)\(", entry)
    assert sorted(kind for _, kind in whole) == ["fusion"] * 4 + ["parameter"] * 4
    assert all("scatter" in name for name, kind in whole if kind == "fusion")
