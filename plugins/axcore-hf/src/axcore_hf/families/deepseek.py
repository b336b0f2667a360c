"""DeepSeek-V3: latent attention, and mixtures of experts after some dense layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from axcore.nn import LatentAttention, Linear, RMSNorm, layers_of
from axcore_hf.families.rope import ROPE, rope
from axcore_hf.families.shared import (
    EMBEDDINGS,
    LAYER,
    MIXTURE,
    MLP,
    NORMS,
    causal_lm,
    feed_forward,
    fixed,
    linear,
    pre_norm,
    quantized,
    sizes,
)
from axcore_hf.family import Family, Rule, rule
from axcore_hf.fields import Fields, OrNull
from axcore_hf.transforms import ByHead, Fused
from axcore_moe.experts import Experts
from axcore_moe.layer import MoE
from axcore_moe.router import TopK
from axcore_rope.scaling import YaRN, yarn_mscale


def deepseek_v3(fields: Fields) -> Any:
    nope, rotated, heads = fields("qk_nope_head_dim"), fields("qk_rope_head_dim"), fields("num_attention_heads")
    fields.only("head_dim", None, rotated)  # derived fields, as transformers writes them
    fields.only("qk_head_dim", None, nope + rotated)
    fields.only("num_key_value_heads", None, heads)
    for name, value in (("moe_layer_freq", 1), ("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        fields.only(name, value)  # transformers supports only these
    quantized(fields, "fp8", weight_block_size=[128, 128])
    layout: Any = "interleaved" if fields("rope_interleave") else "half"
    position = rope(fields, head_dim=rotated, layout=layout)
    scale = 1 / math.sqrt(nope + rotated)
    if isinstance(position.scaling, YaRN) and position.scaling.mscale_all_dim:
        scale *= yarn_mscale(position.scaling.factor, position.scaling.mscale_all_dim) ** 2
    biased = Linear.Config(use_bias=fields("attention_bias"))
    inner = RMSNorm.Config(eps=1e-6)
    mixer = LatentAttention.Config(
        num_heads=heads,
        q_lora_rank=fields("q_lora_rank"),
        kv_lora_rank=fields("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotated,
        value_dim=fields("v_head_dim"),
        query_norm=inner,
        kv_norm=inner,
        query_down=biased,
        kv_down=biased,
        position_key=biased,
        projection=biased,
        position=position,
        scale=scale,
    )
    expert = feed_forward(fields, "moe_intermediate_size")
    mixture = MoE.Config(
        num_experts=fields("n_routed_experts"),
        router=TopK.Config(
            top_k=fields("num_experts_per_tok"),
            score="sigmoid",
            normalize=bool(fields("norm_topk_prob")),
            scale=fields("routed_scaling_factor"),
            groups=fields("n_group"),
            top_groups=fields("topk_group"),
            bias_rate=0.001,
        ),
        experts=Experts.Config(block=expert),
        shared=expert.set(hidden_dim=expert.hidden_dim * fields("n_shared_experts")),
    )
    dense = feed_forward(fields)
    first = fields("first_k_dense_replace")
    numbers = range(fields("num_hidden_layers"))
    return causal_lm(fields, [pre_norm(fields, mixer, dense if number < first else mixture) for number in numbers])


HEADS = f"{LAYER}.self_attn"
OURS = "decoder.{i}.attention"
FIXED: tuple[Rule, ...] = (
    *EMBEDDINGS,
    *NORMS,
    *MLP,
    *linear(f"{OURS}.query_down", f"{HEADS}.q_a_proj"),
    rule(f"{OURS}.query_norm.scale", f"{HEADS}.q_a_layernorm.weight"),
    rule((f"{OURS}.kv_down.weight", f"{OURS}.position_key.weight"), f"{HEADS}.kv_a_proj_with_mqa.weight", Fused()),
    rule((f"{OURS}.kv_down.bias", f"{OURS}.position_key.bias"), f"{HEADS}.kv_a_proj_with_mqa.bias", Fused()),
    rule(f"{OURS}.kv_norm.scale", f"{HEADS}.kv_a_layernorm.weight"),
    *linear(f"{OURS}.projection", f"{HEADS}.o_proj"),
    *MIXTURE,
    rule("decoder.{i}.ffn.router.bias", f"{LAYER}.mlp.gate.e_score_correction_bias"),
    *linear("decoder.{i}.ffn.shared_block.gate", f"{LAYER}.mlp.shared_experts.gate_proj"),
    *linear("decoder.{i}.ffn.shared_block.up", f"{LAYER}.mlp.shared_experts.up_proj"),
    *linear("decoder.{i}.ffn.shared_block.down", f"{LAYER}.mlp.shared_experts.down_proj"),
)


def rules(cfg: Any) -> Sequence[Rule]:
    layer: Any = layers_of(cfg.decoder)[0].config
    mixer = layer.attention
    query = "q_b_proj" if mixer.q_lora_rank is not None else "q_proj"
    ups = f"{OURS}.key_up.weight", f"{OURS}.value_up.weight"
    up = rule(ups, f"{HEADS}.kv_b_proj.weight", ByHead(mixer.num_heads))
    return fixed((*FIXED, *linear(f"{OURS}.query_up", f"{HEADS}.{query}"), up))(cfg)


MTP = r"model\.layers\.61\..*"
"""The tensors of the published multi-token prediction module, which `transformers` ignores too."""

FAMILIES = (
    Family(
        "DeepSeek-V3",
        ("deepseek_v3",),
        deepseek_v3,
        rules,
        ignored=(r".*rotary_emb\.inv_freq", MTP),
        defaults={
            **sizes(vocab=129_280, hidden=7168, intermediate=18_432, layers=61, heads=128),
            **ROPE,
            "hidden_act": "silu",
            "num_key_value_heads": OrNull(128),
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "q_lora_rank": OrNull(1536),
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "qk_head_dim": None,
            "v_head_dim": 128,
            "rope_interleave": OrNull(True),
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 2048,
            "moe_layer_freq": 1,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "norm_topk_prob": OrNull(True),
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
        no_effect={
            "aux_loss_alpha",
            "ep_size",
            "mlp_bias",
            "num_mtp_layers",
            "num_nextn_predict_layers",
            "output_router_logits",
            "partial_rotary_factor",
            "seq_aux",
        },
        aliases={"num_local_experts": "n_routed_experts"},
    ),
)
