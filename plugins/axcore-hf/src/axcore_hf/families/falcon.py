"""Falcon: multi-query or grouped attention beside a plain feed-forward block, and ALiBi in some models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axcore.config import ConfigError
from axcore.nn import Attention, FeedForward, LayerNorm, Linear, ParallelLayer, TransformerLayer, layers_of
from axcore_hf.families.rope import ROPE
from axcore_hf.families.shared import (
    activation,
    attention,
    causal_lm,
    check_heads,
    fixed,
    fused_qkv,
    layer_norm,
    linear,
    pre_norm,
)
from axcore_hf.family import Family, Rule, rule
from axcore_hf.fields import Fields
from axcore_hf.transforms import ByHead, Transposed
from axcore_rope.alibi import Alibi


def falcon(fields: Fields) -> Any:
    check_heads(fields)
    norm = LayerNorm.Config(eps=fields("layer_norm_epsilon"))
    mixer, ffn = _attention(fields), _feed_forward(fields)
    is_new, is_parallel = fields("new_decoder_architecture"), fields("parallel_attn")
    norms = fields.only("num_ln_in_parallel_attn", None, 1, *([2] if is_new else []))
    if is_new and not is_parallel:
        raise ConfigError(f"{fields.where}: new_decoder_architecture=true requires parallel_attn=true")
    layer: ParallelLayer.Config | TransformerLayer.Config
    if is_parallel:
        layer = ParallelLayer.Config(norm=norm, attention=mixer, ffn=ffn)
        if is_new and norms != 1:
            layer = layer.set(ffn_norm=norm)
    else:
        layer = pre_norm(fields, mixer, ffn, norm)
    return causal_lm(fields, [layer] * fields("num_hidden_layers"), norm=norm)


def _attention(fields: Fields) -> Attention.Config:
    heads, kv_heads, is_multi_query = fields("num_attention_heads"), fields("num_kv_heads"), fields("multi_query")
    if not fields("new_decoder_architecture"):
        kv_heads = 1 if is_multi_query else fields.only("num_kv_heads", None, heads)
    head_dim = fields("hidden_size") // heads
    mixer = attention(fields, bias=fields("bias"), num_kv_heads=kv_heads or heads, head_dim=head_dim)
    if fields("alibi"):
        mixer = mixer.set(position=None, bias=Alibi.Config(scale=head_dim**-0.5, is_rounded=True))
    return mixer


def _feed_forward(fields: Fields) -> FeedForward.Config:
    hidden, biased = fields("ffn_hidden_size"), Linear.Config(use_bias=fields("bias"))
    return FeedForward.Config(
        hidden_dim=4 * fields("hidden_size") if hidden is None else hidden,
        activation=activation(fields, "activation"),
        gate=None,
        up=biased,
        down=biased,
    )


LAYER = "transformer.h.{i}"
FIXED: tuple[Rule, ...] = (
    rule("embedding.weight", "transformer.word_embeddings.weight"),
    *layer_norm("norm", "transformer.ln_f"),
    rule("head.weight", "lm_head.weight", Transposed()),
    *linear("decoder.{i}.attention.projection", f"{LAYER}.self_attention.dense"),
    *linear("decoder.{i}.ffn.up", f"{LAYER}.mlp.dense_h_to_4h"),
    *linear("decoder.{i}.ffn.down", f"{LAYER}.mlp.dense_4h_to_h"),
    *layer_norm("decoder.{i}.attention_norm", f"{LAYER}.input_layernorm"),
)
SHARED = layer_norm("decoder.{i}.norm", f"{LAYER}.input_layernorm")
APART = (*layer_norm("decoder.{i}.norm", f"{LAYER}.ln_attn"), *layer_norm("decoder.{i}.ffn_norm", f"{LAYER}.ln_mlp"))
AFTER = layer_norm("decoder.{i}.ffn_norm", f"{LAYER}.post_attention_layernorm")


def rules(cfg: Any) -> Sequence[Rule]:
    layer: Any = layers_of(cfg.decoder)[0].config
    fused = fused_qkv(f"{LAYER}.self_attention.query_key_value", ByHead(layer.attention.num_kv_heads))
    norms = AFTER if isinstance(layer, TransformerLayer.Config) else SHARED if layer.ffn_norm is None else APART
    return fixed((*FIXED, *fused, *norms), "transformer.word_embeddings.weight")(cfg)


FAMILIES = (
    Family(
        "Falcon",
        ("falcon",),
        falcon,
        rules,
        prefix="transformer.",
        defaults={
            "vocab_size": 65_024,
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "num_kv_heads": None,
            "ffn_hidden_size": None,
            **ROPE,
            "activation": "gelu",
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 2048,
            "alibi": False,
            "bias": False,
            "multi_query": True,
            "parallel_attn": True,
            "new_decoder_architecture": False,
            "num_ln_in_parallel_attn": None,
            "tie_word_embeddings": True,
        },
        no_effect={"apply_residual_connection_post_layernorm", "ff_factor", "partial_rotary_factor"},
        aliases={"n_embed": "hidden_size"},
    ),
)
