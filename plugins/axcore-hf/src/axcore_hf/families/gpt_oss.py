"""gpt-oss: attention sinks, sliding windows in every second layer, experts with biases and a clamped gate."""

from __future__ import annotations

from typing import Any

from axcore.nn import ClampedSwiGLU, FeedForward, Linear, Zeros
from axcore_hf.families.rope import ROPE, rope
from axcore_hf.families.shared import (
    ATTENTION,
    EMBEDDINGS,
    LAYER,
    NORMS,
    attention,
    causal_lm,
    fixed,
    linear,
    mixture,
    pre_norm,
    quantized,
    sizes,
    sliding,
    window,
)
from axcore_hf.family import Family, rule
from axcore_hf.fields import Fields
from axcore_hf.transforms import MXFP4, Interleaved, Plain

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The parameters of configs without any."""


def gpt_oss(fields: Fields) -> Any:
    biased = Linear.Config(use_bias=True)
    quantized(fields, "mxfp4")
    gating = ClampedSwiGLU(alpha=fields("swiglu_alpha"), limit=fields("swiglu_limit"))
    block = FeedForward.Config(
        hidden_dim=fields("intermediate_size"), gate=biased, up=biased, down=biased, gating=gating
    )
    sparse = mixture(fields, block, "num_local_experts")
    sparse = sparse.set(router=sparse.router.set(linear=sparse.router.linear.set(use_bias=True)))

    size, position = fields("sliding_window"), rope(fields, otherwise=YARN)

    def layer(local: bool) -> Any:
        mixer = attention(fields, sinks=Zeros(), mask=window(size if local else None), position=position)
        return pre_norm(fields, mixer, sparse)

    every_second = [number % 2 == 0 for number in range(fields("num_hidden_layers"))]
    return causal_lm(fields, [layer(local) for local in sliding(fields, every_second)])


OURS, THEIRS = "decoder.{i}.ffn.experts", f"{LAYER}.mlp.experts"
RULES = (
    *EMBEDDINGS,
    *NORMS,
    *ATTENTION,
    rule("decoder.{i}.attention.sinks", f"{LAYER}.self_attn.sinks"),
    *linear("decoder.{i}.ffn.router.linear", f"{LAYER}.mlp.router"),
    rule((f"{OURS}.gate.weight", f"{OURS}.up.weight"), f"{THEIRS}.gate_up_proj", Interleaved()),
    rule((f"{OURS}.gate.bias", f"{OURS}.up.bias"), f"{THEIRS}.gate_up_proj_bias", Interleaved()),
    rule(f"{OURS}.down.weight", f"{THEIRS}.down_proj"),
    rule(f"{OURS}.down.bias", f"{THEIRS}.down_proj_bias"),
    # Published checkpoints store the experts in 4 bits.
    rule(
        (f"{OURS}.gate.weight", f"{OURS}.up.weight"),
        (f"{THEIRS}.gate_up_proj_blocks", f"{THEIRS}.gate_up_proj_scales"),
        MXFP4(Interleaved()),
        can_write=False,
    ),
    rule(
        f"{OURS}.down.weight",
        (f"{THEIRS}.down_proj_blocks", f"{THEIRS}.down_proj_scales"),
        MXFP4(Plain()),
        can_write=False,
    ),
)

FAMILIES = (
    Family(
        "gpt-oss",
        ("gpt_oss",),
        gpt_oss,
        fixed(RULES),
        defaults={
            **sizes(vocab=201_088, hidden=2880, intermediate=2880, layers=36, heads=64),
            **ROPE,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "attention_bias": True,
            "sliding_window": 128,
            "layer_types": None,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        no_effect={
            "experts_per_token",
            "hidden_act",
            "initial_context_length",
            "mlp_bias",
            "output_router_logits",
            "partial_rotary_factor",
            "router_aux_loss_coef",
        },
        aliases={"num_experts": "num_local_experts"},
    ),
)
