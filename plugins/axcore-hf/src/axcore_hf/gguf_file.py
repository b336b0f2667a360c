"""GGUF files of llama.cpp: config fields, rules for tensors, and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from axcore.config import AxcoreError, ConfigError
from axcore.nn import layers_of
from axcore_hf.families.shared import linear
from axcore_hf.family import Rule, rule
from axcore_hf.fields import Fields
from axcore_hf.sources import Gguf
from axcore_hf.transforms import InterleavedRope, Transposed

ARCHITECTURES = {"llama": "llama"}
"""general.architecture -> model_type."""
TAKES_DIGITS_APART = {"smollm": True, "gpt-2": False}
"""tokenizer.ggml.pre -> whether each digit is split off as a word before GPT-2's splitting."""
DEFAULTS = {
    "attention.head_count_kv": None,
    "attention.key_length": None,
    "attention.value_length": None,
    "rope.dimension_count": None,
    "rope.freq_base": 10_000.0,
    "rope.scaling.type": "none",
}
"""The values of absent metadata."""
CONTROL = 3
"""tokenizer.ggml.token_type of special tokens."""


def config_of(source: Gguf) -> dict[str, Any]:
    """The fields of a `config.json` that is equivalent to the metadata.

    Raises:
        AxcoreError: the architecture is not supported, or metadata are missing.
    """
    kind = source.fields.get("general.architecture")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{source.where}: the architecture {kind!r} is not supported. Known: {known}")

    own = {name.removeprefix(f"{kind}."): value for name, value in source.fields.items() if name.startswith(f"{kind}.")}
    field = Fields(own, f"{source.where} (metadata of {kind})", defaults=DEFAULTS, no_effect={"vocab_size"})
    heads, dim = field("attention.head_count"), field("embedding_length")
    kv_heads, head_dim = field("attention.head_count_kv") or heads, field("attention.key_length") or dim // heads
    for name in ("attention.value_length", "rope.dimension_count"):
        field.only(name, None, head_dim)
    field.only("rope.scaling.type", "none")
    if "rope_freqs.weight" in source.shapes:
        raise ConfigError(
            f"{source.where} scales the frequencies of RoPE (rope_freqs.weight), which is not supported. Import the "
            f"transformers checkpoint of the model (hf:DIR)."
        )
    if "token_embd.weight" not in source.shapes:
        raise AxcoreError(f"{source.where} has no tensor token_embd.weight. Is it one part of a split model?")
    fields = {
        "model_type": ARCHITECTURES[kind],
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": source.shapes["token_embd.weight"][0],
        "hidden_size": dim,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base"),
        "max_position_embeddings": field("context_length"),
        "tie_word_embeddings": "output.weight" not in source.shapes,
        "bos_token_id": source.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.fields.get("tokenizer.ggml.eos_token_id"),
    }
    field.refuse_unread()
    return fields


def rules(cfg: Any) -> Sequence[Rule]:
    """Rules with llama.cpp's names. The rows of its query and key matrices are ordered for interleaved RoPE."""
    layer: Any = layers_of(cfg.decoder)[0].config
    mixer = layer.attention
    heads, kv_heads = mixer.num_heads, mixer.num_kv_heads or mixer.num_heads
    ours, theirs = "decoder.{i}", "blk.{i}"
    return (
        rule("embedding.weight", "token_embd.weight"),
        rule("norm.scale", "output_norm.weight"),
        rule("head.weight", "output.weight", Transposed()),
        rule(f"{ours}.attention_norm.scale", f"{theirs}.attn_norm.weight"),
        rule(f"{ours}.ffn_norm.scale", f"{theirs}.ffn_norm.weight"),
        rule(f"{ours}.attention.query.weight", f"{theirs}.attn_q.weight", InterleavedRope(heads)),
        rule(f"{ours}.attention.key.weight", f"{theirs}.attn_k.weight", InterleavedRope(kv_heads)),
        *linear(f"{ours}.attention.value", f"{theirs}.attn_v"),
        *linear(f"{ours}.attention.projection", f"{theirs}.attn_output"),
        *linear(f"{ours}.ffn.gate", f"{theirs}.ffn_gate"),
        *linear(f"{ours}.ffn.up", f"{theirs}.ffn_up"),
        *linear(f"{ours}.ffn.down", f"{theirs}.ffn_down"),
    )


def tokenizer_files(source: Gguf) -> dict[str, bytes]:
    """The tokenizer files for the byte-level BPE in the metadata. Empty if the metadata describe no tokenizer.

    Raises:
        ConfigError: the kind of tokenizer is not supported.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, fields = source.fields.get("tokenizer.ggml.model"), source.fields
    if kind is None:
        return {}
    if kind != "gpt2":
        raise ConfigError(f"{source.where}: tokenizer.ggml.model={kind!r} is not supported. Known: gpt2")
    split = fields.get("tokenizer.ggml.pre") or "gpt-2"
    if split not in TAKES_DIGITS_APART:
        known = ", ".join(TAKES_DIGITS_APART)
        raise ConfigError(f"{source.where}: tokenizer.ggml.pre={split!r} is not supported. Known: {known}")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    before = [pre_tokenizers.Digits(individual_digits=True)] if TAKES_DIGITS_APART[split] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = fields.get("tokenizer.ggml.token_type") or []
    special = [token for token, kind in zip(tokens, types, strict=False) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    described = {"chat_template": fields.get("tokenizer.chat_template"), "tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos", "unknown", "padding"):
        number = fields.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None:
            described[{"unknown": "unk", "padding": "pad"}.get(name, name) + "_token"] = tokens[number]
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(described, indent=2).encode(),
    }
