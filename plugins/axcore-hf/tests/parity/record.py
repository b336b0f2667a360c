"""Writes a small random checkpoint of each family and the values of `transformers`. Requires `transformers`.

python tests/parity/record.py [FAMILY ...]
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from seeded import implementation

HERE = Path(__file__).parent / "recorded"
ROWS, SEQ, VOCAB = 2, 24, 64
SHORT = 10  # the first document of a packed row

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
SMALL = {"vocab_size": 32}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
FALCON = {**SMALL, "intermediate_size": ..., "num_key_value_heads": ..., "ffn_hidden_size": 24}
FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "llama3": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama_biased": ("LlamaForCausalLM", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "smollm": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "attn_pdrop": 0,
            "embd_pdrop": 0,
            "resid_pdrop": 0,
        },
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**SMALL, "num_attention_heads": 2, "num_key_value_heads": ...},
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 7}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **SMALL,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
            "mlp_only_layers": [1],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 8,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            "head_dim": 8,
            "sliding_window": 7,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 5,
            "head_dim": 8,
            "sliding_window": 7,
            "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] + ["sliding_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**SMALL, "head_dim": 8, "attention_bias": True}),
    "phi": (
        "PhiForCausalLM",
        "PhiConfig",
        {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1, "qk_layernorm": True, "resid_pdrop": 0.0},
    ),
    "phi3": (
        "Phi3ForCausalLM",
        "Phi3Config",
        {
            "hidden_size": 32,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 16,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0, 1.1],
                "long_factor": [2.0, 3.0],
                "original_max_position_embeddings": 16,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {}),
    "olmoe": (
        "OlmoeForCausalLM",
        "OlmoeConfig",
        {**SMALL, "intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {**SMALL, "sliding_window": 7}),
    "olmo3": (
        "Olmo3ForCausalLM",
        "Olmo3Config",
        {
            **SMALL,
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 500_000.0, "attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
            },
        },
    ),
    "exaone4": (
        "Exaone4ForCausalLM",
        "Exaone4Config",
        {**SMALL, "num_hidden_layers": 3, "sliding_window": 7, "sliding_window_pattern": 3},
    ),
    "glm": ("GlmForCausalLM", "GlmConfig", {**SMALL, "head_dim": 8}),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {**SMALL, "head_dim": 8}),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {
            **SMALL,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 1.5,
        },
    ),
    "seed_oss": ("SeedOssForCausalLM", "SeedOssConfig", {**SMALL, "head_dim": 8, "residual_dropout": 0.0}),
    "smollm3": (
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        {
            **SMALL,
            "num_hidden_layers": 3,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 12,
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 5,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**SMALL, "use_qk_norm": True, "logit_scale": 0.25}),
    "cohere2": (
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {**SMALL, "num_hidden_layers": 3, "sliding_window": 7, "sliding_window_pattern": 3, "logit_scale": 0.25},
    ),
    "stablelm": (
        "StableLmForCausalLM",
        "StableLmConfig",
        {"num_attention_heads": 2, "num_key_value_heads": 1, "use_qkv_bias": True},
    ),
    "stablelm_parallel": (
        "StableLmForCausalLM",
        "StableLmConfig",
        {**SMALL, "hidden_size": 32, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "falcon": ("FalconForCausalLM", "FalconConfig", FALCON),
    "falcon_rw": (
        "FalconForCausalLM",
        "FalconConfig",
        # With 16 heads, transformers rounds the slopes of ALiBi.
        {
            **FALCON,
            "hidden_size": 32,
            "num_attention_heads": 16,
            "alibi": True,
            "bias": True,
            "multi_query": False,
            "parallel_attn": False,
        },
    ),
    "falcon_new": (
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            "num_hidden_layers": 2,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            # With this small base, the ends of the ramp lie between pairs, so truncation changes the result.
            "rope_parameters": {**YARN, "rope_theta": 10.0, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    ),
}


def given(name: str) -> dict:
    """The arguments of the config class. `...` stands for a field that the class does not have."""
    *_, fields = FAMILIES[name]
    common = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2} if name == "gpt2" else COMMON
    return {field: value for field, value in {**common, **fields}.items() if value is not ...}


def randomize(model: torch.nn.Module, zero_centred: bool) -> None:
    """Fills every parameter with random numbers, so that missing or swapped parameters are detected."""
    generator = torch.Generator().manual_seed(0)
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for name, parameter in [*model.named_parameters(), *biases]:
        start = 1.0 if parameter.ndim == 1 and "norm" in name and not zero_centred else 0.0
        if "ln_" in name and name.endswith("weight"):
            start = 1.0
        parameter.data = start + 0.3 * torch.randn(parameter.shape, generator=generator)


def logits_of(model: torch.nn.Module, ids: torch.Tensor, **kwargs: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **kwargs).logits.float().numpy()


def record(name: str) -> None:
    model_class, config_class, _ = FAMILIES[name]
    config = getattr(transformers, config_class)(**given(name))
    config._attn_implementation = implementation(config.model_type)
    model = getattr(transformers, model_class)(config).eval()
    randomize(model, zero_centred=name.startswith(("gemma", "nemotron")))
    model.tie_weights()
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)

    ids = torch.randint(3, config.vocab_size, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    left, right = torch.ones(ROWS, SEQ, dtype=torch.long), torch.ones(ROWS, SEQ, dtype=torch.long)
    left[1, :5], right[0, -6:] = 0, 0
    packed = np.concatenate([logits_of(model, ids[:, :SHORT]), logits_of(model, ids[:, SHORT:])], axis=1)
    arrays = {
        "ids": ids.numpy(),
        "plain": logits_of(model, ids),
        "left_mask": left.numpy(),
        "left": logits_of(model, ids, attention_mask=left),
        "right_mask": right.numpy(),
        "right": logits_of(model, ids, attention_mask=right),
        "packed": packed,
    }
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].reshape(-1))
    loss.backward()
    arrays["loss"] = loss.detach().numpy()
    np.savez_compressed(folder / "reference.npz", **arrays)
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    gradients = folder / "gradients"
    model.save_pretrained(gradients)
    for file in gradients.iterdir():
        if file.suffix != ".safetensors":
            file.unlink()


def record_mxfp4() -> None:
    """Writes random 4-bit blocks and their values as decoded by `transformers`."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(100, 140, (2, 6, 3), generator=generator).to(torch.uint8)
    wide = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    np.savez_compressed(HERE / "mxfp4.npz", blocks=blocks.numpy(), scales=scales.numpy(), wide=wide.numpy())


if __name__ == "__main__":
    for each in sys.argv[1:] or FAMILIES:
        print(each, flush=True)
        record(each)
    record_mxfp4()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    (HERE / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")
