"""Recipes of published models have the parameters of their published configs, so both can be converted."""

import math

import jax
import pytest

import axcore as ax
from axcore.config import walk
from axcore.module import abstract
from axcore.nn import BaseAttention, RMSNorm, by_layer, layers_of
from axcore.train.checkpoint.model_folder import flat
from axcore_hf.families import family_of
from axcore_hf.fields import Fields

# Values from the published config.json files.
LLAMA2 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32_000,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
LLAMA3 = LLAMA2 | {
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 8192,
}
QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1_000_000,
    "vocab_size": 151_936,
    "attention_bias": False,
    "max_position_embeddings": 40_960,
}
PUBLISHED = {
    "llama2-7b": LLAMA2,
    "llama2-13b": LLAMA2
    | {
        "hidden_size": 5120,
        "intermediate_size": 13_824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    },
    "llama3-8b": LLAMA3,
    "llama3-70b": LLAMA3
    | {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "qwen3-0.6b": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "mixtral-8x7b": LLAMA2
    | {
        "model_type": "mixtral",
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
    },
    "gemma3-4b": {
        "model_type": "gemma3_text",
        "rms_norm_eps": 1e-6,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "max_position_embeddings": 131_072,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "rms_norm_eps": 1e-6,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129_280,
        "rope_theta": 10_000,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "norm_topk_prob": True,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "vocab_size": 201_088,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
}


def parameters(cfg):
    """The shape of each parameter, with stacked layers separated."""
    forms = flat(abstract(cfg)[1])
    return {name: forms[path].shape[len(index) :] for name, (path, index) in by_layer(cfg, forms).items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_matches_the_published_config(name):
    fields = Fields(PUBLISHED[name])
    published = family_of(fields).read_config(fields)
    ours = ax.recipe(name).model.set(future=())
    assert parameters(ours) == parameters(published)
    for mine, theirs in zip(layers_of(ours.decoder), layers_of(published.decoder), strict=True):
        a, b = mine.config.attention, theirs.config.attention
        assert a.mask == b.mask and a.position == b.position
        assert (a.scale or 1 / math.sqrt(width(a))) == pytest.approx(b.scale or 1 / math.sqrt(width(b)))
    norms = {node.eps for _, node in walk(ours) if isinstance(node, RMSNorm.Config)}
    assert norms == {node.eps for _, node in walk(published) if isinstance(node, RMSNorm.Config)}
    assert jax.tree.leaves(parameters(ours)) and issubclass(type(a).target, BaseAttention)


def width(attention):
    """Features per head of queries and keys."""
    return (
        getattr(attention, "qk_nope_head_dim", 0) + attention.qk_rope_head_dim
        if hasattr(attention, "qk_rope_head_dim")
        else attention.head_dim or 128
    )
