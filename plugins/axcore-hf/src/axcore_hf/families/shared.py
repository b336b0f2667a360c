"""Shared parts of families."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from axcore.config import ConfigError
from axcore.module import Layer
from axcore.nn import (
    Attention,
    Causal,
    CausalLM,
    FeedForward,
    Linear,
    Mask,
    RMSNorm,
    SameSegment,
    SlidingWindow,
    TransformerLayer,
    exact_gelu,
    squared_relu,
    stacked,
)
from axcore_hf.families.rope import LAYER_TYPES, head_dim, rope
from axcore_hf.family import Rule, Rules, rule
from axcore_hf.fields import Fields, NotNull, is_whole
from axcore_hf.transforms import Fused, Stacked, Tied, Transform, Transposed
from axcore_moe.experts import Experts
from axcore_moe.layer import MoE
from axcore_moe.router import TopK

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": exact_gelu,
    "gelu_fast": jax.nn.gelu,
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "relu2": squared_relu,
}
EVERYTHING_BEFORE = Causal() & SameSegment()
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def sizes(vocab: int, hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    """The defaults of the fields that all families of this package have, except GPT-2."""
    return {
        **dict(zip(SIZES, (vocab, hidden, intermediate, layers, heads), strict=True)),
        "num_key_value_heads": None,
        "head_dim": NotNull(),
        "tie_word_embeddings": False,
    }


def activation(fields: Fields, name: str = "hidden_act") -> Callable[[jax.Array], jax.Array]:
    return ACTIVATIONS[fields.only(name, *ACTIVATIONS)]


def norm(fields: Fields, **more: Any) -> RMSNorm.Config:
    return RMSNorm.Config(eps=fields("rms_norm_eps"), **more)


def check_heads(fields: Fields) -> None:
    """Raises if the heads do not divide the width, which some families of `transformers` require."""
    dim, heads = fields("hidden_size"), fields("num_attention_heads")
    if dim % heads:
        raise ConfigError(f"{fields.where}: hidden_size={dim} must be a multiple of num_attention_heads={heads}")


def attention(
    fields: Fields, *, bias: bool | None = None, output_bias: bool | None = None, **more: Any
) -> Attention.Config:
    """Grouped-query attention.

    Args:
        bias: bias of queries, keys and values. None uses `attention_bias`.
        output_bias: bias of the projection. None uses `bias`.
        more: other fields of the config. `num_kv_heads`, `head_dim` and `position` are read from the fields by default.
    """
    heads = fields("num_attention_heads")
    if "num_kv_heads" not in more:
        more["num_kv_heads"] = fields("num_key_value_heads") or heads
    if "head_dim" not in more:
        more["head_dim"] = head_dim(fields)
    if "position" not in more:
        more["position"] = rope(fields, head_dim=more["head_dim"])
    biased = fields("attention_bias") if bias is None else bias
    linear = Linear.Config(use_bias=biased)
    return Attention.Config(
        num_heads=heads,
        query=linear,
        key=linear,
        value=linear,
        projection=Linear.Config(use_bias=biased if output_bias is None else output_bias),
        **more,
    )


def feed_forward(
    fields: Fields, name: str = "intermediate_size", *, bias: bool = False, **more: Any
) -> FeedForward.Config:
    linear = Linear.Config(use_bias=bias)
    given = {"gate": linear, "up": linear, "down": linear, **more}
    if "activation" not in given:
        given["activation"] = activation(fields)
    return FeedForward.Config(hidden_dim=fields(name), **given)


def mixture(
    fields: Fields, block: FeedForward.Config, count: str = "num_experts", *, normalize: bool = True, **more: Any
) -> MoE.Config:
    """A mixture of experts.

    Args:
        block: the config of an expert.
        count: the field with the number of experts.
        normalize: whether the weights of the chosen experts add up to 1.
        more: other fields of the config.
    """
    router = TopK.Config(top_k=fields("num_experts_per_tok"), normalize=normalize)
    return MoE.Config(num_experts=fields(count), router=router, experts=Experts.Config(block=block), **more)


def pre_norm(
    fields: Fields, mixer: Layer.Config, ffn: Layer.Config, before: Layer.Config | None = None
) -> TransformerLayer.Config:
    """A layer with a norm before each block: `before`, or else the RMSNorm of the fields."""
    before = norm(fields) if before is None else before
    return TransformerLayer.Config(attention_norm=before, attention=mixer, ffn_norm=before, ffn=ffn)


def post_norm(fields: Fields, mixer: Layer.Config) -> TransformerLayer.Config:
    """A layer with a norm after each block, before its residual."""
    return TransformerLayer.Config(
        attention_norm=None,
        attention=mixer,
        attention_output_norm=norm(fields),
        ffn_norm=None,
        ffn=feed_forward(fields),
        ffn_output_norm=norm(fields),
    )


def causal_lm(fields: Fields, layers: Sequence[Layer.Config], **more: Any) -> CausalLM.Config:
    """The model with these layers."""
    if "norm" not in more:
        more["norm"] = norm(fields)
    return CausalLM.Config(
        vocab_size=fields("vocab_size"),
        dim=fields("hidden_size"),
        decoder=stacked(layers),
        head=None if fields("tie_word_embeddings") else Linear.Config(),
        **more,
    )


def quantized(fields: Fields, method: str, **known: Any) -> None:
    """Checks that `quantization_config`, if present, describes the format that the family's rules decode."""
    table = fields.optional("quantization_config")
    for name, value in {"quant_method": method, **known}.items() if table is not None else ():
        if table.get(name) != value:
            raise ConfigError(
                f"{fields.where}: quantization_config has {name}={table.get(name)!r}, which is not supported. "
                f"Known: {value!r}."
            )


def window(size: int | None) -> Mask:
    return EVERYTHING_BEFORE if size is None else EVERYTHING_BEFORE & SlidingWindow(size=size)


def sliding(fields: Fields, default: Sequence[bool]) -> list[bool]:
    """Whether each layer uses a sliding window. `default` is used for configs without `layer_types`."""
    kinds = fields("layer_types")
    if kinds is None:
        return list(default)
    if len(kinds) != len(default):
        raise ConfigError(f"{fields.where}: layer_types lists {len(kinds)} layers, but the model has {len(default)}")
    for kind in kinds:
        if kind not in LAYER_TYPES:
            raise ConfigError(
                f"{fields.where}: layer_types has {kind!r}, which is not supported. Known: {', '.join(LAYER_TYPES)}"
            )
    return [kind == "sliding_attention" for kind in kinds]


def sliding_by_pattern(fields: Fields) -> list[bool]:
    """Whether each layer uses a sliding window: without `layer_types`, all but every `sliding_window_pattern`-th do."""
    pattern, numbers = fields("sliding_window_pattern"), range(fields("num_hidden_layers"))
    if fields("layer_types") is not None:
        return sliding(fields, [False for _ in numbers])
    if not is_whole(pattern, 1):
        raise ConfigError(
            f"{fields.where}: sliding_window_pattern={pattern!r} must be a positive whole number, since the config has "
            f"no layer_types"
        )
    return [(number + 1) % pattern != 0 for number in numbers]


def window_size(fields: Fields) -> int | None:
    """The window of a family whose windows are off unless `use_sliding_window` is true."""
    size: int | None = fields("sliding_window")
    return size if fields("use_sliding_window") else None


def windows(fields: Fields, size: int | None, are_sliding: Sequence[bool]) -> list[int | None]:
    """The window of each layer, if `size` is that of the config."""
    if size is None and any(are_sliding):
        raise ConfigError(
            f"{fields.where}: layer_types has 'sliding_attention', but the config has no window. Set sliding_window, "
            f"and use_sliding_window=true if the family has this field."
        )
    return [size if is_sliding else None for is_sliding in are_sliding]


EMBEDDINGS: tuple[Rule, ...] = (
    rule("embedding.weight", "model.embed_tokens.weight"),
    rule("norm.scale", "model.norm.weight"),
    rule("head.weight", "lm_head.weight", Transposed()),
)


def fixed(rules: Sequence[Rule], embedding: str = "model.embed_tokens.weight") -> Rules:
    """Rules shared by all models of a family. With a tied head, the checkpoint may store the embedding twice."""
    tied = rule("embedding.weight", (embedding, "lm_head.weight"), Tied(), can_write=False)
    return lambda cfg: rules if cfg.head is not None else (tied, *rules)


def linear(ours: str, theirs: str) -> tuple[Rule, Rule]:
    """Rules of a linear map and its bias, if any."""
    return rule(f"{ours}.weight", f"{theirs}.weight", Transposed()), rule(f"{ours}.bias", f"{theirs}.bias")


def layer_norm(ours: str, theirs: str) -> tuple[Rule, Rule]:
    """Rules of a LayerNorm and its bias, if any."""
    return rule(f"{ours}.scale", f"{theirs}.weight"), rule(f"{ours}.bias", f"{theirs}.bias")


def fused_qkv(theirs: str, transform: Transform) -> tuple[Rule, Rule]:
    """Rules of queries, keys and values that are one linear map in the checkpoint."""
    weights, biases = (
        tuple(f"decoder.{{i}}.attention.{name}.{part}" for name in ("query", "key", "value"))
        for part in ("weight", "bias")
    )
    return rule(weights, f"{theirs}.weight", transform), rule(biases, f"{theirs}.bias", transform)


LAYER = "model.layers.{i}"
ATTENTION: tuple[Rule, ...] = (
    *linear("decoder.{i}.attention.query", f"{LAYER}.self_attn.q_proj"),
    *linear("decoder.{i}.attention.key", f"{LAYER}.self_attn.k_proj"),
    *linear("decoder.{i}.attention.value", f"{LAYER}.self_attn.v_proj"),
    *linear("decoder.{i}.attention.projection", f"{LAYER}.self_attn.o_proj"),
    rule("decoder.{i}.attention.query_norm.scale", f"{LAYER}.self_attn.q_norm.weight"),
    rule("decoder.{i}.attention.key_norm.scale", f"{LAYER}.self_attn.k_norm.weight"),
)
NORMS: tuple[Rule, ...] = (
    rule("decoder.{i}.attention_norm.scale", f"{LAYER}.input_layernorm.weight"),
    rule("decoder.{i}.ffn_norm.scale", f"{LAYER}.post_attention_layernorm.weight"),
)
OUTPUT_NORMS: tuple[Rule, ...] = (
    rule("decoder.{i}.attention_output_norm.scale", f"{LAYER}.post_attention_layernorm.weight"),
    rule("decoder.{i}.ffn_output_norm.scale", f"{LAYER}.post_feedforward_layernorm.weight"),
)
LAYER_NORMS: tuple[Rule, ...] = (
    *layer_norm("norm", "model.norm"),
    *layer_norm("decoder.{i}.attention_norm", f"{LAYER}.input_layernorm"),
    *layer_norm("decoder.{i}.ffn_norm", f"{LAYER}.post_attention_layernorm"),
)
MLP: tuple[Rule, ...] = (
    *linear("decoder.{i}.ffn.gate", f"{LAYER}.mlp.gate_proj"),
    *linear("decoder.{i}.ffn.up", f"{LAYER}.mlp.up_proj"),
    *linear("decoder.{i}.ffn.down", f"{LAYER}.mlp.down_proj"),
)
FUSED_MLP: tuple[Rule, ...] = (
    rule(("decoder.{i}.ffn.gate.weight", "decoder.{i}.ffn.up.weight"), f"{LAYER}.mlp.gate_up_proj.weight", Fused()),
    *linear("decoder.{i}.ffn.down", f"{LAYER}.mlp.down_proj"),
)


def experts(router: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Rules of a mixture of experts with separate tensors per expert. The names are relative to the layer."""
    return (
        *linear("decoder.{i}.ffn.router.linear", f"{LAYER}.{router}"),
        rule("decoder.{i}.ffn.experts.gate.weight", f"{LAYER}.{gate}.weight", Stacked()),
        rule("decoder.{i}.ffn.experts.up.weight", f"{LAYER}.{up}.weight", Stacked()),
        rule("decoder.{i}.ffn.experts.down.weight", f"{LAYER}.{down}.weight", Stacked()),
    )


MIXTURE = experts("mlp.gate", "mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj", "mlp.experts.{e}.down_proj")
