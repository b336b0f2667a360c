"""The training step that XLA compiles for TPUs multiplies codes, not floats."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

import axcore as ax
from axcore.aot import Target
from axcore.nn import Attention, CausalLM, FeedForward, Sequence, TransformerLayer
from axcore.parallel import Mesh
from axcore.train import CrossEntropy, Learner
from axcore.train.step.program import program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
]
LINEAR = 7
"""Linear maps of the layer."""


def llama():
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=4, num_kv_heads=2), ffn=FeedForward.Config(hidden_dim=768)
    )
    model = CausalLM.Config(vocab_size=512, dim=512, decoder=Sequence.Config(layers=(layer,)))
    return model.set(dtypes=ax.DTypes(compute=jnp.bfloat16))


def products(model):
    """[(dtypes of the operands, dtype of the result)] of the matrix products in a compiled step."""
    layout = Mesh(shape={"data": 1}).make(Target.of("tpu-v5e-1").devices())
    made = program(model, Learner.Config(), layout, CrossEntropy.Config())
    rows = jax.ShapeDtypeStruct((4, 512), jnp.int32)
    batch = {"inputs": rows, "targets": rows, "weights": jax.ShapeDtypeStruct((4, 512), jnp.float32)}
    text = made.trace_train(batch).lower().compile().as_text()
    kinds = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", text))
    found = re.findall(r"= (\w+)\[[^=]* (?:convolution|dot)\((%[\w.-]+), (%[\w.-]+)\)", text)
    return [(kinds[a], kinds[b], result) for result, a, b in found]


@pytest.mark.parametrize(
    ("options", "each"),
    [({}, 2), ({"weight_gradient": "int8", "rounding": "stochastic"}, 3)],
    ids=str,
)
def test_every_covered_product_multiplies_codes(options, each):
    model = llama()
    floats = products(model)
    found = products(ax.use("int8", where="decoder.**", **options)(model))
    assert not any("s8" in kinds for kinds in floats)
    assert found.count(("s8", "s8", "s32")) == each * LINEAR
    assert len(found) == len(floats)
    assert not [kinds for kinds in found if "s8" in kinds and kinds != ("s8", "s8", "s32")]
