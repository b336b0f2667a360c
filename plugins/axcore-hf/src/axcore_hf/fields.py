"""The fields of a published config. Records which fields were read."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from axcore.config import AxcoreError, ConfigError
from axcore_rope.scaling import is_positive

# fmt: off
HARMLESS = frozenset({
    "_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "attn_pdrop", "auto_map",
    "bos_token_id", "cache_implementation", "dtype", "embd_pdrop", "eos_token_id", "ep_size", "experts_per_token",
    "gradient_checkpointing", "head_dim", "id2label", "initial_context_length", "initializer_range", "is_decoder",
    "is_llama_config", "label2id", "max_length", "max_position_embeddings", "model_type", "n_ctx",
    "num_attention_heads", "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type", "resid_pdrop",
    "return_dict", "router_aux_loss_coef", "router_jitter_noise", "sliding_window", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
    "tokenizer_class", "torch_dtype", "transformers_version", "unsloth_version", "use_cache", "vocab_size",
})
# fmt: on
"""Fields that a family may leave unread: they do not affect the output in evaluation, or only in families that read
them."""

# fmt: off
FLAGS = frozenset({
    "add_cross_attention", "attention_bias", "mlp_bias", "norm_topk_prob", "reorder_and_upcast_attn", "rope_interleave",
    "scale_attn_by_inverse_layer_idx", "scale_attn_weights", "seq_aux", "tie_word_embeddings",
    "use_bidirectional_attention", "use_sliding_window",
})
RATES = frozenset({
    "attn_logit_softcapping", "final_logit_softcapping", "layer_norm_epsilon", "partial_rotary_factor",
    "query_pre_attn_scalar", "rms_norm_eps", "rope_local_base_freq", "rope_theta", "routed_scaling_factor",
    "swiglu_alpha", "swiglu_limit",
})
"""Positive numbers."""
COUNTS = frozenset({
    "decoder_sparse_step", "head_dim", "hidden_size", "intermediate_size", "kv_lora_rank", "max_position_embeddings",
    "moe_intermediate_size", "n_embd", "n_group", "n_head", "n_inner", "n_layer", "n_positions", "n_routed_experts",
    "n_shared_experts",
    "num_attention_heads", "num_experts", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads",
    "num_local_experts", "original_max_position_embeddings", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "sliding_window", "sliding_window_pattern", "topk_group", "v_head_dim", "vocab_size",
})
"""Positive whole numbers."""
FROM_ZERO = frozenset({"first_k_dense_replace", "max_window_layers"})
"""Whole numbers that may be 0."""
LISTS = frozenset({"layer_types", "mlp_only_layers"})
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


class Fields:
    """The fields of a `config.json`.

    Families read the fields through this class. `refuse_unread` then finds the fields that were not used.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json"):
        self.raw, self.where = dict(raw), where
        self._read: set[str] = set()

    @classmethod
    def of_folder(cls, folder: pathlib.Path) -> Fields:
        """The fields of a checkpoint folder.

        Raises:
            AxcoreError: `config.json` does not exist or is not a JSON object.
        """
        file = folder / "config.json"
        try:
            raw = json.loads(file.read_bytes())
        except OSError as error:
            raise AxcoreError(f"{folder} is not a transformers checkpoint: config.json: {error.strerror}") from error
        except ValueError as error:
            raise AxcoreError(f"{file} is not JSON: {error}") from error
        if not isinstance(raw, dict):
            raise AxcoreError(f"{file} is not a JSON object")
        return cls(raw, str(file))

    def __call__(self, name: str, default: Any = ...) -> Any:
        """The value of a field. null counts as missing.

        Raises:
            ConfigError: the field is missing and has no default, or its value is of the wrong kind.
        """
        self._read.add(name)
        value = self.raw.get(name)
        if value is None:
            if default is ...:
                raise ConfigError(f"{self.where} has no field {name!r}")
            return default
        for names, kind, holds in KINDS:
            if name in names and not holds(value):
                raise ConfigError(f"{self.where}: {name}={value!r} must be {kind}")
        return value

    def only(self, name: str, *known: Any, default: Any = None) -> Any:
        """The value of a field that must be one of `known`.

        Raises:
            ConfigError: it has another value.
        """
        value = self(name, default)
        if value not in known:
            raise ConfigError(f"{self.where}: {name}={value!r} is not supported. Known: {', '.join(map(repr, known))}.")
        return value

    def unread(self) -> dict[str, Any]:
        """Fields that were not read and are not known to be harmless. Fields with empty values are harmless."""
        return {
            name: value
            for name, value in self.raw.items()
            if name not in self._read and name not in HARMLESS and not name.startswith("_") and value
        }

    def refuse_unread(self) -> None:
        """Raises if a field was not read, since the field may change what the model computes.

        Raises:
            ConfigError: lists these fields.
        """
        if left := self.unread():
            listed = ", ".join(f"{name}={value!r}" for name, value in sorted(left.items()))
            kind = f" for model_type {self.raw['model_type']!r}" if "model_type" in self.raw else ""
            raise ConfigError(f"{self.where}: not supported{kind}: {listed}")
