"""Writes the `config.json` of a model that was not imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from axcore.config import AxcoreError, ConfigError, walk
from axcore.module import Layer
from axcore.nn import And, Attention, FeedForward, LatentAttention, Mask, ParallelLayer, SlidingWindow, Stack, layers_of
from axcore.train.checkpoint.state_layout import listed
from axcore_hf.agreement import Agreement, compared, differences, different_shapes
from axcore_hf.families import by_type, known
from axcore_hf.families.shared import ACTIVATIONS
from axcore_hf.family import Family
from axcore_hf.fields import Fields
from axcore_moe.layer import MoE
from axcore_rope.alibi import Alibi
from axcore_rope.learned import LearnedPositions
from axcore_rope.published import ORIGINAL, to_rope_parameters
from axcore_rope.rotary import Rotary
from axcore_rope.scaling import DynamicNTK, LongRoPE

FIRST = "llama"
"""The family that is tried first, since most libraries support it."""
LENGTH = 2048
"""`max_position_embeddings` of a model whose training length is not known."""
OWN = "To export the model, add a family for it: see 'Adding a family' in the README of axcore-hf"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Written as null unless the tokenizer has them, since `transformers` has other defaults."""
FUNCTIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")
"""The name of each function in `ACTIVATIONS`."""
CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
}
"""Classes of `transformers` whose names do not follow from the `model_type`."""


def described(model: Any, seq_len: int | None = None) -> dict[str, Any]:
    """The fields of a `config.json` that describes a model exactly.

    Args:
        model: config of the model.
        seq_len: length of the rows that it was trained on.

    Raises:
        AxcoreError: no family computes the same. The message lists what the nearest family lacks.
    """
    nearest: tuple[tuple[int, int], str, Any] | None = None
    unusable = ""
    kinds = (FIRST, *(kind for kind in known() if kind != FIRST))
    for kind in kinds:
        try:
            family = by_type(kind)
        except AxcoreError as error:
            unusable += f"\nNot compared with {kind}: {error}"
            continue
        for fields in _attempts(kind, family, model, seq_len):
            try:
                theirs = family.read_config(Fields(fields))
            except ConfigError:  # the family does not have this option
                continue
            lacking = differences(theirs, model) or different_shapes(theirs, model)
            if not lacking:
                return fields
            distance = len(_kinds(theirs) ^ _kinds(model)), len(lacking)
            if nearest is None or distance < nearest[0]:
                nearest = distance, kind, theirs
    raise AxcoreError(
        f"none of the {len(kinds)} known families computes what the model computes, so it has no config.json."
        f"{'' if nearest is None else _nearest(nearest[1], compared(nearest[2], model))}{unusable}\n{OWN}"
    )


def _nearest(kind: str, found: Agreement) -> str:
    """How a model differs from the nearest family, and when it can be exported as that family."""
    text = f" The nearest, {kind}, differs:{listed(found.options or found.shapes)}"
    if found.shapes:
        return text
    return f"{text}\nTo write the checkpoint with a config.json that describes another model: --config FILE --force"


def _kinds(model: Any) -> set[type]:
    """The classes of the layers of a model."""
    return {
        type(node) for _, node in walk(model) if isinstance(node, Layer.Config) and not isinstance(node, Stack.Config)
    }


def _attempts(kind: str, family: Family, model: Any, seq_len: int | None) -> Iterator[dict[str, Any]]:
    """Configs of one family that may describe the model. They differ in fields that only some families have."""
    name = CLASSES.get(kind, kind.title().replace("_", "") + "ForCausalLM")
    for by_type_of_layer in (False, True):
        try:
            proposed = proposal(model, seq_len, by_type_of_layer)
        except ConfigError:  # RoPE with a scaling that has no rope_type
            return
        own = {field: value for field, value in proposed.items() if field in family.defaults}
        given = {field: value for field, value in own.items() if value is not None}
        for fields in (own, given) if given != own else (own,):
            yield {"model_type": kind, "architectures": [name], "dtype": "float32", **dict.fromkeys(IDS), **fields}


def proposal(model: Any, seq_len: int | None, by_type_of_layer: bool) -> dict[str, Any]:
    """The value that each field has if a family has the field, for all families. None means null or absent.

    Args:
        by_type_of_layer: whether local and global layers have their own RoPE.
    """
    layers = [place.config for place in layers_of(model.decoder)]
    blocks = [getattr(layer, "ffn", None) for layer in layers]
    return {
        **_sizes(model, layers, seq_len),
        "residual_multiplier": getattr(layers[0], "residual_scale", 1.0),
        **_norms(model),
        **_attention(model, [getattr(layer, "attention", None) for layer in layers], by_type_of_layer),
        **_feed_forward(blocks),
        **_mixture(blocks),
        **_falcon(layers[0]),
    }


def _sizes(model: Any, layers: list[Any], seq_len: int | None) -> dict[str, Any]:
    length = model.position.max_len if isinstance(model.position, LearnedPositions.Config) else seq_len or LENGTH
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "n_embd": model.dim,
        "num_hidden_layers": len(layers),
        "n_layer": len(layers),
        "tie_word_embeddings": model.head is None,
        "use_parallel_residual": isinstance(layers[0], ParallelLayer.Config),
        "final_logit_softcapping": model.softcap,
        "logit_scale": model.logit_scale,
        "embedding_multiplier": 1.0 if model.embedding.scale is None else model.embedding.scale,
        "logits_scaling": 1 / model.logit_scale,
        "max_position_embeddings": length,
        "n_positions": length,
    }


def _norms(model: Any) -> dict[str, Any]:
    eps = getattr(model.norm, "eps", None)
    return dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon"), eps)


def _attention(model: Any, mixers: list[Any], by_type_of_layer: bool) -> dict[str, Any]:
    first = mixers[0]
    if not isinstance(first, Attention.Config | LatentAttention.Config):
        return {}
    found: dict[str, Any] = {"num_attention_heads": first.num_heads, "n_head": first.num_heads}
    found["attn_logit_softcapping"] = first.softcap
    if isinstance(first, Attention.Config):
        head_dim = rotated = first.head_dim or model.dim // first.num_heads
        found |= {"head_dim": head_dim, "num_key_value_heads": first.num_kv_heads or first.num_heads}
        biased = first.query is not None and first.query.use_bias
        found |= dict.fromkeys(("attention_bias", "bias", "qkv_bias", "use_bias", "use_qkv_bias"), biased)
        found |= dict.fromkeys(("qk_layernorm", "use_qk_norm"), first.query_norm is not None)
        found["attention_out_bias"] = first.projection.use_bias
        scale = head_dim**-0.5 if first.scale is None else first.scale
        found["attention_multiplier"] = scale
        found["query_pre_attn_scalar"] = round(scale**-2)  # transformers requires an int
    else:
        rotated = first.qk_rope_head_dim
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        found |= {name: getattr(first, name) for name in names}
        found |= {"num_key_value_heads": first.num_heads, "v_head_dim": first.value_dim}
        found["attention_bias"] = first.kv_down.use_bias
    windows = [_window(mixer.mask) for mixer in mixers]
    kinds = ["full_attention" if size is None else "sliding_attention" for size in windows]
    found["layer_types"] = kinds
    found["sliding_window"] = next((size for size in windows if size is not None), None)
    found["use_sliding_window"] = found["sliding_window"] is not None
    found["max_window_layers"] = kinds.index("sliding_attention") if "sliding_attention" in kinds else len(kinds)
    positions = [mixer.position for mixer in mixers]
    found["no_rope_layers"] = [int(position is not None) for position in positions]
    ropes = {kind: rope for kind, rope in zip(kinds, positions, strict=True) if isinstance(rope, Rotary.Config)}
    if ropes and (len(ropes) == len(set(kinds)) or not by_type_of_layer):
        of_kind = {kind: to_rope_parameters(rope, rotated) for kind, rope in ropes.items()}
        first_kind, rope = next(iter(ropes.items()))
        found["rope_parameters"] = of_kind if by_type_of_layer else of_kind[first_kind]
        found |= dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (rope.rotary_dim or rotated) / rotated)
        found["rope_interleave"] = rope.layout == "interleaved"
        found[ORIGINAL] = of_kind[first_kind].get(ORIGINAL)
        scaling = rope.scaling
        if isinstance(scaling, DynamicNTK):  # transformers takes these original lengths and factors from this field
            found["max_position_embeddings"] = scaling.original_max
        elif isinstance(scaling, LongRoPE):
            found["max_position_embeddings"] = round(scaling.factor * scaling.original_max)
    return found


def _falcon(layer: Any) -> dict[str, Any]:
    """The fields that tell the kinds of Falcon apart."""
    mixer = getattr(layer, "attention", None)
    if not isinstance(mixer, Attention.Config):
        return {}
    is_parallel, kv_heads = isinstance(layer, ParallelLayer.Config), mixer.num_kv_heads or mixer.num_heads
    has_two_norms = is_parallel and layer.ffn_norm is not None
    is_new = is_parallel and kv_heads < mixer.num_heads and (has_two_norms or kv_heads != 1)
    return {
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "parallel_attn": is_parallel,
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": 1 + has_two_norms if is_new else None,
        "alibi": isinstance(mixer.bias, Alibi.Config),
    }


def _window(mask: Mask) -> int | None:
    parts = mask.masks if isinstance(mask, And) else (mask,)
    return next((part.size for part in parts if isinstance(part, SlidingWindow)), None)


def _feed_forward(blocks: list[Any]) -> dict[str, Any]:
    plain = [block for block in blocks if isinstance(block, FeedForward.Config)]
    experts = [block.experts.block for block in blocks if isinstance(block, MoE.Config)]
    if not plain and not experts:
        return {}
    block = (plain or experts)[0]
    function = next((name for name in FUNCTIONS if ACTIVATIONS[name] is block.activation), None)
    return {
        "intermediate_size": block.hidden_dim,
        "n_inner": block.hidden_dim,
        "ffn_hidden_size": block.hidden_dim,
        "mlp_bias": block.up is not None and block.up.use_bias,
        "hidden_act": function,
        "hidden_activation": function,
        "activation_function": function,
        "activation": function,
    }


def _mixture(blocks: list[Any]) -> dict[str, Any]:
    mixture = next((block for block in blocks if isinstance(block, MoE.Config)), None)
    if mixture is None:
        return {}
    dense = [number for number, block in enumerate(blocks) if not isinstance(block, MoE.Config)]
    inner, router = mixture.experts.block, mixture.router
    shared = mixture.shared.hidden_dim if mixture.shared is not None else 0
    return {
        "num_experts": mixture.num_experts,
        "num_local_experts": mixture.num_experts,
        "n_routed_experts": mixture.num_experts,
        "num_experts_per_tok": getattr(router, "top_k", None),
        "norm_topk_prob": getattr(router, "normalize", None),
        "routed_scaling_factor": getattr(router, "scale", None),
        "n_group": getattr(router, "groups", None),
        "topk_group": getattr(router, "top_groups", None),
        "moe_intermediate_size": inner.hidden_dim,
        "n_shared_experts": shared // inner.hidden_dim,
        "shared_expert_intermediate_size": shared,
        "first_k_dense_replace": len(dense),
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
        "swiglu_alpha": getattr(inner.gating, "alpha", None),
        "swiglu_limit": getattr(inner.gating, "limit", None),
    }
