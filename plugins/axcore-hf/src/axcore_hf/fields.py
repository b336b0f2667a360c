"""The fields of a published config. Records which fields were read."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from axcore.config import AxcoreError, ConfigError, did_you_mean
from axcore_rope.scaling import is_positive

# fmt: off
BOOKKEEPING = frozenset({
    # names, ids, versions and labels
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "architectures",
    "auto_map", "bos_token_id", "decoder_start_token_id", "dtype", "eos_token_id", "finetuning_task", "id2label",
    "label2id", "model_type", "pad_token_id", "prefix", "problem_type", "sep_token_id", "task_specific_params",
    "tokenizer_class", "torch_dtype", "transformers_version", "unsloth_version",
    # what a call returns, and how torch runs
    "gradient_checkpointing", "output_attentions", "output_hidden_states", "pretraining_tp", "return_dict",
    "tf_legacy_loss", "torchscript", "use_bfloat16", "use_cache",
    # training
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "classifier_dropout", "embd_pdrop",
    "embedding_dropout", "hidden_dropout", "hidden_dropout_prob", "initializer_range", "resid_pdrop",
    "residual_dropout",
    # generation
    "bad_words_ids", "begin_suppress_tokens", "cache_implementation", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length",
    "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature",
    "top_k", "top_p", "typical_p",
})
# fmt: on
"""Fields that do not affect what any model computes in evaluation."""

COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "is_decoder": (True, False),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}
"""Fields that a config of any family may have, and the values that describe what axcore computes. A family that reads
such a field checks it itself."""

# fmt: off
FLAGS = frozenset({
    "add_cross_attention", "alibi", "attention_bias", "attention_out_bias", "bias", "mlp_bias", "multi_query",
    "new_decoder_architecture", "norm_topk_prob", "parallel_attn", "qk_layernorm", "qkv_bias",
    "reorder_and_upcast_attn", "rope_interleave", "scale_attn_by_inverse_layer_idx", "scale_attn_weights", "seq_aux",
    "tie_word_embeddings", "use_bias", "use_bidirectional_attention", "use_parallel_residual", "use_qk_norm",
    "use_qkv_bias", "use_sliding_window",
})
RATES = frozenset({
    "attention_multiplier", "attn_logit_softcapping", "embedding_multiplier", "final_logit_softcapping",
    "layer_norm_eps", "layer_norm_epsilon", "logit_scale", "logits_scaling", "norm_eps", "norm_epsilon",
    "partial_rotary_factor", "query_pre_attn_scalar", "residual_multiplier", "rms_norm_eps", "rope_local_base_freq",
    "rope_theta", "rotary_emb_base", "rotary_pct", "routed_scaling_factor", "swiglu_alpha", "swiglu_limit",
})
"""Positive numbers."""
COUNTS = frozenset({
    "decoder_sparse_step", "head_dim", "hidden_size", "intermediate_size", "kv_lora_rank", "max_position_embeddings",
    "moe_intermediate_size", "n_embd", "n_group", "n_head", "n_inner", "n_layer", "n_positions", "n_routed_experts",
    "ffn_hidden_size", "n_shared_experts", "no_rope_layer_interval", "num_attention_heads", "num_experts",
    "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads", "num_kv_heads", "num_local_experts",
    "original_max_position_embeddings", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "shared_expert_intermediate_size", "topk_group", "v_head_dim", "vocab_size",
})
"""Positive whole numbers."""
FROM_ZERO = frozenset({"first_k_dense_replace", "max_window_layers", "sliding_window"})
"""Whole numbers that may be 0."""
LISTS = frozenset({"layer_types", "mlp_only_layers", "no_rope_layers"})
TABLES = frozenset({"quantization_config", "rope_parameters", "rope_scaling"})
# fmt: on


def is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


KINDS: tuple[tuple[frozenset[str], str, Callable[[Any], bool]], ...] = (
    (FLAGS, "true or false", lambda value: isinstance(value, bool)),
    (RATES, "a positive number", is_positive),
    (COUNTS, "a positive whole number", lambda value: is_whole(value, 1)),
    (FROM_ZERO, "a whole number, at least 0", lambda value: is_whole(value, 0)),
    (LISTS, "a list", lambda value: isinstance(value, list)),
    (TABLES, "an object", lambda value: isinstance(value, dict)),
)
"""Field names, description and check of each kind of value."""


@dataclasses.dataclass(frozen=True)
class OrNull:
    """A default of a field that may also be null: `default` if the field is absent, None if it is null."""

    default: Any


@dataclasses.dataclass(frozen=True)
class NotNull:
    """A default of a field that must not be null: None if the field is absent, since it follows from other fields."""

    default: ClassVar[None] = None


def read_object(file: pathlib.Path) -> dict[str, Any]:
    """The contents of a JSON file.

    Raises:
        AxcoreError: the file is not a JSON object.
        OSError: it cannot be read.
    """
    try:
        raw = json.loads(file.read_bytes())
    except ValueError as error:
        raise AxcoreError(f"{file} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise AxcoreError(f"{file} is not a JSON object")
    return raw


class Fields:
    """The fields of a `config.json`.

    Families read the fields through this class. `refuse_unread` then finds the fields that were not used.

    Args:
        defaults, no_effect, aliases: see `Family`.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        where: str = "config.json",
        *,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        no_effect: Collection[str] = (),
        aliases: Mapping[str, str] = MappingProxyType({}),
    ):
        self.raw, self.where, self.no_effect = dict(raw), where, frozenset(no_effect)
        self._defaults = defaults
        self._read: set[str] = set()
        for alias, name in aliases.items():
            if alias in self.raw:
                value = self.raw.pop(alias)
                if self.raw.setdefault(name, value) != value:
                    raise ConfigError(
                        f"{where}: {name}={self.raw[name]!r} and {alias}={value!r} are names of the same field. "
                        f"Remove one of them."
                    )

    @classmethod
    def of_folder(cls, folder: pathlib.Path) -> Fields:
        """The fields of a checkpoint folder.

        Raises:
            AxcoreError: `config.json` does not exist or is not a JSON object.
        """
        file = folder / "config.json"
        try:
            return cls(read_object(file), str(file))
        except OSError as error:
            raise AxcoreError(f"{folder} is not a transformers checkpoint: config.json: {error.strerror}") from error

    def __call__(self, name: str) -> Any:
        """The value of a field, or the family's default if the field is absent.

        Raises:
            ConfigError: the field is absent and has no default, or its value is of the wrong kind.
        """
        if name not in self.raw and name not in self._defaults:
            raise ConfigError(f"{self.where} has no field {name!r}, and its family declares no default")
        return self.optional(name)

    def optional(self, name: str) -> Any:
        """As `__call__`, but None if the field is absent and has no default.

        Raises:
            ConfigError: the value is of the wrong kind.
        """
        self._read.add(name)
        default = self._defaults.get(name)
        may_be_null = default is None or isinstance(default, OrNull)
        if name not in self.raw:
            return default.default if isinstance(default, OrNull | NotNull) else default
        value = self.raw[name]
        if value is None and may_be_null:
            return None
        for names, kind, holds in KINDS:
            if name in names and not holds(value):
                raise ConfigError(f"{self.where}: {name}={value!r} must be {kind}")
        if value is None:
            raise ConfigError(f"{self.where}: {name} must not be null. Remove the field for its default, {default!r}.")
        return value

    def only(self, name: str, *known: Any) -> Any:
        """The value of a field that must be one of `known`.

        Raises:
            ConfigError: it has another value.
        """
        value = self(name)
        if value not in known:
            raise ConfigError(f"{self.where}: {name}={value!r} is not supported. Known: {', '.join(map(repr, known))}.")
        return value

    def unread(self) -> dict[str, Any]:
        """The fields that may affect the model and were not read."""
        known = self._read | self.no_effect | BOOKKEEPING | COMPUTED.keys()
        return {name: value for name, value in self.raw.items() if name not in known}

    def refuse_unread(self) -> None:
        """Raises if a field was not read, since the field may change what the model computes.

        Raises:
            ConfigError: lists these fields.
        """
        kind = f" for model_type {self.raw['model_type']!r}" if "model_type" in self.raw else ""
        for name, values in COMPUTED.items():
            if name in self.raw and name not in self._read and self.raw[name] not in values:
                raise ConfigError(
                    f"{self.where}: {name}={self.raw[name]!r} is not supported{kind}. Known: "
                    f"{', '.join(map(repr, values))}."
                )
        if left := self.unread():
            listed = ", ".join(f"{name}={value!r}" for name, value in sorted(left.items()))
            misspelt = [name for name in left if not any(name in names for names, *_ in KINDS)]  # not of another family
            near = did_you_mean(misspelt[0], self._defaults) if len(left) == len(misspelt) == 1 else ""
            raise ConfigError(
                f"{self.where}: not supported{kind}: {listed}.{near} Fields may change what the model computes. Remove "
                f"one only if transformers ignores it."
            )
