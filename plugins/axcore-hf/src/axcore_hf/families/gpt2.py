"""GPT-2: learned positions, LayerNorm, a plain feed-forward block, biases everywhere."""

from __future__ import annotations

import math
from typing import Any

from axcore.nn import Attention, CausalLM, FeedForward, LayerNorm, Linear, TransformerLayer, stacked
from axcore_hf.families.shared import activation, fixed, fused_qkv, layer_norm
from axcore_hf.family import Family, rule
from axcore_hf.fields import Fields
from axcore_hf.transforms import Fused, Transposed
from axcore_rope.learned import LearnedPositions


def gpt2(fields: Fields) -> Any:
    dim, heads = fields("n_embd"), fields("n_head")
    biased, norm = Linear.Config(use_bias=True), LayerNorm.Config(eps=fields("layer_norm_epsilon"))
    fields.only("scale_attn_by_inverse_layer_idx", False)
    scale = 1 / math.sqrt(dim // heads) if fields("scale_attn_weights") else 1.0
    hidden = fields("n_inner")
    layer = TransformerLayer.Config(
        attention_norm=norm,
        attention=Attention.Config(
            num_heads=heads, query=biased, key=biased, value=biased, projection=biased, scale=scale
        ),
        ffn_norm=norm,
        ffn=FeedForward.Config(
            hidden_dim=4 * dim if hidden is None else hidden,
            activation=activation(fields, "activation_function"),
            gate=None,
            up=biased,
            down=biased,
        ),
    )
    return CausalLM.Config(
        vocab_size=fields("vocab_size"),
        dim=dim,
        position=LearnedPositions.Config(max_len=fields("n_positions")),
        decoder=stacked([layer] * fields("n_layer")),
        norm=norm,
        head=None if fields("tie_word_embeddings") else Linear.Config(),
    )


LAYER = "transformer.h.{i}"


def _conv(ours: str, theirs: str) -> Any:
    """Rules of a linear map whose published matrix is [in, out]."""
    return rule(f"{ours}.weight", f"{theirs}.weight"), rule(f"{ours}.bias", f"{theirs}.bias")


RULES = (
    rule("embedding.weight", "transformer.wte.weight"),
    rule("head.weight", "lm_head.weight", Transposed()),
    rule("position.weight", "transformer.wpe.weight"),
    *layer_norm("norm", "transformer.ln_f"),
    *layer_norm("decoder.{i}.attention_norm", f"{LAYER}.ln_1"),
    *layer_norm("decoder.{i}.ffn_norm", f"{LAYER}.ln_2"),
    *fused_qkv(f"{LAYER}.attn.c_attn", Fused(transposed=False)),
    *_conv("decoder.{i}.attention.projection", f"{LAYER}.attn.c_proj"),
    *_conv("decoder.{i}.ffn.up", f"{LAYER}.mlp.c_fc"),
    *_conv("decoder.{i}.ffn.down", f"{LAYER}.mlp.c_proj"),
)

FAMILIES = (
    Family(
        "GPT-2",
        ("gpt2",),
        gpt2,
        fixed(RULES, "transformer.wte.weight"),
        ignored=(r".*\.attn\.(masked_)?bias",),
        prefix="transformer.",
        defaults={
            "vocab_size": 50_257,
            "n_positions": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True,
        },
        no_effect={
            "n_ctx",
            "reorder_and_upcast_attn",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        },
    ),
)
