"""Loss and gradients of models on eight devices equal those on one device."""

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import (
    Attention,
    CausalLM,
    ClampedSwiGLU,
    FeedForward,
    FullWidthNorm,
    LatentAttention,
    LayerNorm,
    Linear,
    MultiTokenPrediction,
    Normal,
    ParallelLayer,
    PerHeadNorm,
    Repeat,
    RMSNorm,
    TransformerLayer,
    edit_layers,
)
from axcore.parallel import Layout, Mesh
from axcore.testing import tiny_batch
from axcore.testing.devices import steps
from axcore.train import CrossEntropy

pytestmark = pytest.mark.long

FSDP = Mesh(shape={"data": 2, "fsdp": 4})
ONE = Mesh(shape={"data": 1, "fsdp": 1})
TENSOR = Mesh(
    shape={"data": 1, "fsdp": 2, "tensor": 4},
    rules={
        "batch": ("data", "fsdp"),
        "embed": "fsdp",
        "head": "tensor",
        "kv_head": "tensor",
        "mlp": "tensor",
        "vocab": "tensor",
    },
)
BIASED = Linear.Config(use_bias=True, bias_init=Normal(stddev=0.1))
FFN = FeedForward.Config(hidden_dim=24)


def latent():
    """Latent attention, multi-token prediction, a padded vocabulary and a chunked loss."""
    attention = LatentAttention.Config(
        num_heads=4, kv_lora_rank=6, q_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, value_dim=3
    )
    layer = TransformerLayer.Config(attention=attention, ffn=FFN)
    return CausalLM.Config(
        vocab_size=30,
        dim=16,
        decoder=Repeat.Config(num_layers=2, layers=layer),
        future=(MultiTokenPrediction.Config(layer=layer),),
        pad_vocab_to=8,
    )


def fused():
    """Fused qkv, norms across and per head, two kinds of layers and a tied head."""
    attention = Attention.Config(
        num_heads=8,
        num_kv_heads=4,
        head_dim=4,
        query=None,
        key=None,
        value=None,
        qkv=BIASED,
        query_norm=PerHeadNorm.Config(),
        key_norm=FullWidthNorm.Config(norm=RMSNorm.Config(zero_centred=True)),
        softcap=5.0,
        sinks=Normal(stddev=1.0),
        projection=BIASED,
    )
    ffn = FFN.set(gate=BIASED, up=BIASED, down=BIASED, gating=ClampedSwiGLU(limit=1.0))
    layer = ParallelLayer.Config(norm=LayerNorm.Config(), attention=attention, ffn=ffn)
    cfg = CausalLM.Config(vocab_size=32, dim=16, decoder=Repeat.Config(num_layers=4, layers=layer), head=None)
    return edit_layers(cfg, FeedForward, lambda path, node, number: node.set(gate=None, gating=None)
                       if number % 2 else node)  # fmt: skip


def batch():
    made = jax.tree.map(np.asarray, tiny_batch(rows=8))
    made = {name: np.minimum(value, 29) if name != "weights" else value for name, value in made.items()}
    made["segment_ids"] = np.cumsum(np.arange(8) % 3 == 0)[None].repeat(8, axis=0).astype(np.int32)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("model", [latent, fused])
@pytest.mark.parametrize("mesh", [TENSOR, FSDP], ids=["fsdp, tensor", "fsdp"])
def test_eight_devices_agree_with_one(model, mesh):
    one, many = steps(model(), batch(), [ONE, mesh], CrossEntropy.Config(z_loss=1e-2, chunk=3))
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-5)
    assert many["updates"].keys() == one["updates"].keys()
    for path, update in one["updates"].items():
        assert np.abs(update).max() > 1e-7, path
        atol = 1e-6 + 1e-4 * np.abs(update).max()
        np.testing.assert_allclose(many["updates"][path], update, rtol=0, atol=atol, err_msg=path)
    by_heads = "key_up.weight" if model is latent else "qkv.weight"
    by_embed = "kv_down.weight" if model is latent else "qkv.weight"
    for part in (by_embed, by_heads) if mesh is TENSOR else (by_embed,):
        assert any(path.endswith(part) for path in many["sharded"])
    assert "embedding.weight" in many["sharded"]


def test_a_padded_vocabulary_can_be_sharded():
    layout = Layout(jax.sharding.AbstractMesh(tuple(TENSOR.shape.values()), tuple(TENSOR.shape)), TENSOR.rules)

    def spread(cfg):
        fn, params, _ = abstract(cfg)
        return layout.shardings(params, fn.axes)

    cfg = latent()
    assert spread(cfg)["embedding"]["weight"].shard_shape((32, 16)) == (8, 8)
    with pytest.raises(ax.ConfigError, match=r"embedding\.weight: its dimension 'vocab' of size 30 is not divisible"):
        spread(cfg.set(pad_vocab_to=1))


@pytest.mark.slow
@pytest.mark.parametrize("is_fused", [False, True], ids=["separate", "fused"])
def test_case_one_kv_head_on_two_tensor_devices_agrees_with_one(is_fused):
    """With the standard rules, heads are divided between the devices of `tensor`, and the only kv head is not."""
    attention = Attention.Config(num_heads=4, num_kv_heads=1, projection=BIASED)
    if is_fused:
        attention = attention.set(query=None, key=None, value=None, qkv=BIASED)
    layer = TransformerLayer.Config(attention=attention, ffn=FFN)
    cfg = CausalLM.Config(vocab_size=32, dim=16, decoder=Repeat.Config(num_layers=2, layers=layer))
    one, many = steps(cfg, batch(), [Mesh(shape={"data": 1}), Mesh(shape={"data": 2, "fsdp": 2, "tensor": 2})])
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-5)
    for path, update in one["updates"].items():
        assert np.abs(update).max() > 1e-7, path
        atol = 1e-6 + 1e-4 * np.abs(update).max()
        np.testing.assert_allclose(many["updates"][path], update, rtol=0, atol=atol, err_msg=path)
    assert "decoder.layers.attention.projection.weight" in many["sharded"]
