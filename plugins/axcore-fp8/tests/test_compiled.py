"""The FP8 products in programs that XLA compiles for H100, without a GPU."""

import re

import jax
import jax.numpy as jnp
import pytest

import axcore as ax
from axcore.aot import Target
from axcore.aot.lowering import lower
from axcore.nn import Attention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.parallel import Mesh
from axcore.train import Learner

from .support import linear

pytestmark = pytest.mark.slow
pytest.importorskip("jax_plugins.xla_cuda13")

OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
"""Without a GPU, XLA turns products into Triton fusions. It also merges small products with a common operand."""
LINEARS = 7
"""Linear maps in a layer: query, key, value, projection, gate, up, down."""


def trainer(mesh, **options):
    """A tiny bfloat16 Llama of four layers, whose inner two are a scan."""
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=4, num_kv_heads=2), ffn=FeedForward.Config(hidden_dim=192)
    )
    decoder = Repeat.Config(num_layers=4, layers=layer)
    model = CausalLM.Config(vocab_size=512, dim=128, dtypes=ax.DTypes(compute="bfloat16"), decoder=decoder)
    return ax.recipe("quickstart").set(
        model=ax.pipe(model, ax.use("rope"), ax.use("fp8", **options)),
        learner=Learner.Config(),
        steps=2,
        minutes=None,
        mesh=Mesh(shape=mesh),
        compiler_options=OPTIONS,
    )


def compiled(target, mesh, **options):
    return lower(trainer(mesh, **options), Target.of(target)).compile().as_text()


def fp8_calls(text):
    return text.count('custom_call_target="__cublas$lt$matmul$f8"')


def stored(text):
    """The types of the arrays that kernels write to memory: those of all instructions outside of fusions."""
    bodies = re.split(r"\n(?=\S)", text)
    outside = [body for body in bodies if "fused" not in body.split("(")[0]]
    return [m[1] for body in outside for m in re.finditer(r" = (.*?) [\w\-]+\(", body)]


@pytest.mark.parametrize("options", [{}, {"scaling": "delayed", "amax_history_len": 4}], ids=["current", "delayed"])
def test_each_linear_map_becomes_three_fp8_products(options):
    text = compiled("gpu-h100-1", {"data": 1}, **options)
    assert fp8_calls(text) == 3 * LINEARS
    arrays = stored(text)
    assert any(re.search(r"f8e4m3fn\[(128,\d*,?192|192,\d*,?128)\]", each) for each in arrays)
    assert not any(re.search(r"pred\[(128,\d*,?192|192,\d*,?128)\]", each) for each in arrays)  # no mask
    if options:  # the largest value of an input is found by the kernel that rounds it
        assert any(re.search(r"\(.*f8e4m3fn\[.*bf16\[|\(.*bf16\[.*f8e4m3fn\[", each) for each in arrays)


def test_fsdp_gathers_fp8_weights():
    """Forward and backward pass of the scan gather codes, and all amaxes of its weights are reduced at once."""
    text = compiled("gpu-h100-8", {"fsdp": 8})
    assert fp8_calls(text) == 3 * LINEARS
    gathers = [line for line in text.splitlines() if re.search(r" all-gather(-start)?\(", line)]
    in_scan = [line for line in gathers if "f8e4m3fn" in line]
    assert [line.split(" all-gather")[0].count("f8e4m3fn") // 2 for line in in_scan] == [LINEARS] * len(in_scan)
    assert len(in_scan) == 2 and not [line for line in in_scan if "bf16" in line]
    scatters = [line for line in text.splitlines() if re.search(r" reduce-scatter(-start)?\(", line)]
    assert scatters and not [line for line in scatters if re.search(r"f32\[\d+,", line.split(" reduce-scatter")[0])]


def test_consecutive_linear_maps_compile():
    """If scales were computed from bfloat16 numbers, XLA would fuse the amax of the second product's input into the
    first product, whose scale depends on it, and fail."""
    fn, params, state = linear(128, 128, "bfloat16")
    device = Target.of("gpu-h100-1").devices()[0]
    layout = Mesh(shape={"data": 1}, rules={}).make([device])

    def loss(params, x):
        for _ in range(2):
            x = fn(params, state, x)[0][0]
        return jnp.square(x.astype(jnp.float32)).sum()

    sharding = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16, sharding=sharding)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), params)
    with layout.active():
        step = jax.jit(jax.grad(loss, argnums=(0, 1)))
        text = step.lower(shapes, x).compile(OPTIONS).as_text()
    assert fp8_calls(text) == 6
