"""gpt-oss: attention sinks, sliding windows in every second layer, experts with biases and a clamped gate."""

from __future__ import annotations

from typing import Any

from axcore.nn import ClampedSwiGLU, FeedForward, Linear, Zeros
from axcore_hf.families.shared import (
    ATTENTION,
    EMBEDDINGS,
    LAYER,
    NORMS,
    attention,
    causal_lm,
    fixed,
    linear,
    pre_norm,
    sliding,
    window,
)
from axcore_hf.family import Family, rule
from axcore_hf.fields import Fields
from axcore_hf.transforms import MXFP4, Interleaved, Plain
from axcore_moe.experts import Experts
from axcore_moe.layer import MoE
from axcore_moe.router import TopK


def gpt_oss(fields: Fields) -> Any:
    biased = Linear.Config(use_bias=True)
    fields.only("hidden_act", "silu", default="silu")
    fields("quantization_config", None)
    gating = ClampedSwiGLU(alpha=fields("swiglu_alpha", 1.702), limit=fields("swiglu_limit", 7.0))
    block = FeedForward.Config(
        hidden_dim=fields("intermediate_size"), gate=biased, up=biased, down=biased, gating=gating
    )
    router = TopK.Config(top_k=fields("num_experts_per_tok"))
    mixture = MoE.Config(
        num_experts=fields("num_local_experts"),
        router=router.set(linear=router.linear.set(use_bias=True)),
        experts=Experts.Config(block=block),
    )

    def layer(local: bool) -> Any:
        size = fields("sliding_window") if local else None
        mixer = attention(fields, sinks=Zeros(), mask=window(size))
        return pre_norm(fields, mixer, mixture)

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

FAMILIES = (Family("gpt-oss", ("gpt_oss",), gpt_oss, fixed(RULES)),)
