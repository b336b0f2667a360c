"""Writes what `transformers` computes for changes of a config.json. Requires `transformers`.

python tests/parity/record_changes.py [FAMILY ...]

`changes.json` of each family has the base config as `transformers` writes it, the defaults of its config class, when it
ties the embeddings of multimodal models, and changes: by name, as published configs have them, and random ones of one
field. An entry is [change, result], see `seeded.changed`. The result is null if `transformers` raises an error.
Otherwise it is [digest of the names and shapes of the tensors, projections of the logits].
"""

import contextlib
import dataclasses
import itertools
import json
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from published_changes import LLAMA3, PUBLISHED, YARN
from record import FAMILIES, given
from safetensors import safe_open
from safetensors.numpy import save_file
from seeded import IDS, LARGEST, changed, digest, implementation, projections, weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HERE = Path(__file__).parent / "recorded"
COUNT = 30
"""Random changes of each family."""
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0], "factor": 4.0}
LONG |= {"rope_theta": 10_000.0, "original_max_position_embeddings": 16}
ROPES = [
    {},
    {"rope_type": "default", "rope_theta": 100.0},
    {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
    YARN,
    {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    {**YARN, "attention_factor": 1.5},
    {name: value for name, value in YARN.items() if name != "original_max_position_embeddings"},
    LLAMA3,
    LONG,
    {**LONG, "type": "su", "rope_type": "su"},
    {"rope_type": "mrope", "mrope_section": [1, 1]},
    {"full_attention": {"rope_type": "default", "rope_theta": 100.0}},
    {"full_attention": {**YARN}, "sliding_attention": {"rope_type": "default", "rope_theta": 10.0}},
]
PLAUSIBLE = {
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "rope_theta": [100.0, 500_000, 10_000.0],
    "rope_local_base_freq": [10.0, 10_000.0],
    "original_max_position_embeddings": [8, 16, 64],
    "max_position_embeddings": [16, 32, 128],
    "n_positions": [64, 128],
    "vocab_size": [48, 128],
    "partial_rotary_factor": [0.5, 0.25, 1.0],
    "hidden_act": ["silu", "gelu", "relu", "gelu_pytorch_tanh", "tanh"],
    "hidden_activation": ["silu", "gelu", "gelu_pytorch_tanh"],
    "activation_function": ["gelu", "gelu_new", "relu"],
    "layer_types": [["full_attention"] * 2, ["sliding_attention", "full_attention"], ["sliding_attention"] * 3],
    "sliding_window": [3, 7, 16, 4096],
    "is_causal": [True, False],
    "is_decoder": [True, False],
    "is_encoder_decoder": [False],
    "add_cross_attention": [True, False],
    "cross_attention_hidden_size": [16],
    "attention_chunk_size": [5],
    "per_layer_config": [{"0": {"num_attention_heads": 2}}],
    "chunk_size_feed_forward": [0, 2],
    "mlp_only_layers": [[], [0], [1]],
    "quantization_config": [],
    "architectures": [["LlamaModel"]],
    "logit_scale": [0.5],
    "residual_multiplier": [0.5],
    "embedding_multiplier": [2.0],
    "attention_multiplier": [0.5],
    "logits_scaling": [2.0],
    "no_rope_layers": [[1, 0]],
    "qk_layernorm": [True, False],
    "use_qk_norm": [True, False],
    "clip_qkv": [0.5],
    "attention_out_bias": [True],
    "use_parallel_residual": [True, False],
    "rotary_emb_base": [100.0, 10_000],
    "rotary_pct": [0.5],
    "layer_norm_eps": [0.1],
    "embedding_size": [8],
    "head_dim": [4, 8, 16],
    "num_experts": [4, 8],
    "num_local_experts": [4, 8],
    "torch_dtype": ["float32"],
    "dtype": ["float32"],
    "temperature": [0.5],
    "max_length": [3],
}
"""Values of fields for which the generic ones of `values` are unsuitable, and fields of other families."""


PARTIAL = {"full_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
MULTIMODAL = {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "gemma3": "gemma3",
    "internvl": "qwen2",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "vipllava": "llama",
}
"""model_type of a multimodal model -> the base that its `text_config` is."""
LINEAR = {"rope_type": "linear", "factor": 2.0}
OLD_GEMMA3 = {"rope_parameters": [], "rope_theta": [1e6]}
OLD = ("llama3", "phi3", "deepseek_v3", "gpt_oss")


def old(parameters: dict) -> dict[str, list]:
    """The change from `rope_parameters` to the fields that `transformers` wrote before version 5."""
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    return {"rope_parameters": [], "rope_theta": [parameters["rope_theta"]], "rope_scaling": [scaling]}


CASES = {
    "no change": [(name, {}) for name in FAMILIES],
    "old spelling of RoPE": [
        *((name, old(fields["rope_parameters"])) for name, (*_, fields) in FAMILIES.items() if name in OLD),
        (
            "gemma3",
            {**OLD_GEMMA3, "rope_local_base_freq": [1e4], "rope_scaling": [{"rope_type": "linear", "factor": 8.0}]},
        ),
    ],
    "bidirectional": [(name, {"is_causal": [False]}) for name in FAMILIES],
    "original length beside yarn": [("llama", {"rope_parameters": [YARN], "original_max_position_embeddings": [1000]})],
    "original length beside llama3": [("llama3", {"original_max_position_embeddings": [8]})],
    "original length beside longrope": [("phi3", {"original_max_position_embeddings": [64]})],
    "original length only inside longrope": [("phi3", {"original_max_position_embeddings": []})],
    "gemma3 without a local base": [("gemma3", OLD_GEMMA3)],
    "gemma3 with an old scaling": [("gemma3", {**OLD_GEMMA3, "rope_scaling": [LINEAR]})],
    "gemma3 with flat parameters": [("gemma3", {"rope_parameters": [{"rope_type": "default", "rope_theta": 1e6}]})],
    "gemma3 with partial_rotary_factor": [("gemma3", {"rope_parameters": [PARTIAL], "partial_rotary_factor": [0.25]})],
    "gemma3 with attn_logit_softcapping": [("gemma3", {"attn_logit_softcapping": [2.0]})],
    "gpt-oss without scaling": [("gpt_oss", {"rope_parameters": []})],
    "gpt-oss with an old theta": [("gpt_oss", {"rope_parameters": [], "rope_theta": [100.0]})],
    "gemma2 without attn_logit_softcapping": [("gemma2", {"attn_logit_softcapping": []})],
    "gemma2 without final_logit_softcapping": [("gemma2", {"final_logit_softcapping": []})],
    "gemma2 with null softcaps": [("gemma2", {"attn_logit_softcapping": [None], "final_logit_softcapping": [None]})],
    "llama with partial_rotary_factor": [("llama", {"partial_rotary_factor": [0.5]})],
    "olmoe with clip_qkv": [("olmoe", {"clip_qkv": [0.5]})],
    "olmoe with other heads": [("olmoe", {"head_dim": [8]})],
    "phi with a tied head": [("phi", {"tie_word_embeddings": [True]})],
    "phi with other heads": [("phi", {"head_dim": [16]})],
    "gpt-neox with only the usual theta": [("gpt_neox", {"rope_parameters": [], "rope_theta": [100.0]})],
    "qwen2-moe without a window": [("qwen2_moe", {"sliding_window": [None]})],
    "qwen2-moe with windows that are not used": [("qwen2_moe", {"use_sliding_window": [False]})],
    "two thetas": [("llama", {"rope_parameters": [{"rope_theta": 100.0}], "rope_theta": [10.0]})],
}


def bases() -> dict[str, dict]:
    """What `transformers` writes for each small config of record.py."""
    found = {}
    for name, (_, config_class, _) in FAMILIES.items():
        found[name] = json.loads(getattr(transformers, config_class)(**given(name)).to_json_string())
    return found


def defaults(kind: str) -> dict[str, list]:
    """field -> [default], or [default, null] if the field may be null although its default is not."""
    found = {}
    for field in dataclasses.fields(CONFIG_MAPPING[kind]):
        if field.default is not dataclasses.MISSING:
            nullable = "None" in str(field.type) and field.default is not None
            found[field.name] = [field.default, None] if nullable else [field.default]
    return found


def values(name: str, current: object) -> list:
    """Plausible values of a field."""
    if name in PLAUSIBLE:
        return [*PLAUSIBLE[name], None]
    if isinstance(current, bool):
        return [not current, None]
    if isinstance(current, int):
        return [max(current // 2, 1), 2 * current, current + 1, 0, None]
    if isinstance(current, float):
        return [current * 2, current / 2, 1.0, 0.0, None]
    return [True, False, 0, 2, 0.5, None]


def changes(family: str, base: dict[str, dict], known: dict[str, dict[str, list]]) -> list[dict[str, list]]:
    """Every change of one field of a base: of any field of any family."""
    names = {*PLAUSIBLE} | {name for fields in [*base.values(), *known.values()] for name in fields}
    names -= {"model_type", "transformers_version"}
    typical = {name: given[0] for fields in known.values() for name, given in fields.items()}
    typical |= {name: value for fields in base.values() for name, value in fields.items()}
    fields = base[family]
    found: list[dict[str, list]] = [{name: []} for name in sorted(names) if name in fields]
    for name in sorted(names):
        options = values(name, fields.get(name, typical.get(name)))
        found += [{name: [value]} for value in options if [value] != [fields.get(name, ...)]]
    return found


def outcome(raw: dict) -> list | None:
    """The result of a change, see above. Raises `OverflowError` if the model is large."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(raw))
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            large = sum(each.numel() for each in transformers.AutoModelForCausalLM.from_config(config).parameters())
        if large > LARGEST:
            raise OverflowError
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(raw))  # as it was given
        with safe_open(folder / "model.safetensors", "numpy") as opened:
            shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
        seeded = {key: weights(key, shape) for key, shape in shapes.items()}
        save_file(seeded, folder / "model.safetensors", {"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            attn_implementation=implementation(config.model_type),
            experts_implementation="eager",
            dtype=torch.float32,
        ).eval()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(IDS), use_cache=False).logits.float().numpy()
        if not np.isfinite(logits).all():
            raise ValueError("not finite")
        return [digest(shapes), projections(logits)]


def tied(outer: str, given: dict) -> list[list]:
    """[values in the multimodal config, values in its text_config, whether `transformers` ties the embeddings]."""
    found = []
    for around, within in itertools.product(([], [True], [False]), repeat=2):
        nested = changed(given, {"tie_word_embeddings": within})
        config = CONFIG_MAPPING[outer](**changed({"text_config": nested}, {"tie_word_embeddings": around}))
        found.append([around, within, bool(config.tie_word_embeddings)])
    return found


def recorded(base: dict, change: dict[str, list]) -> list:
    """The change with its result."""
    try:
        return [change, outcome(changed(base, change))]
    except OverflowError:
        raise
    except Exception as error:
        print(change, type(error).__name__, str(error).splitlines()[:1], file=sys.stderr)
        return [change, None]


def record(family: str, base: dict[str, dict], known: dict[str, dict[str, list]]) -> None:
    fields = base[family]
    kind = fields["model_type"]
    possible = changes(family, base, known)
    random.Random(family).shuffle(possible)
    found: list[list] = []
    for change in possible:
        with contextlib.suppress(OverflowError):
            found.append(recorded(fields, change))
        if len(found) == COUNT:
            break
    print(f"{family}: {sum(result is not None for _, result in found)} of {COUNT} random changes are read", flush=True)
    parts = {
        "base": fields,
        "defaults": known[kind],
        "theta": CONFIG_MAPPING[kind].default_theta,
        "tied": {outer: tied(outer, fields) for outer, name in MULTIMODAL.items() if name == family},
        "cases": {
            case: recorded(fields, change) for case, some in CASES.items() for name, change in some if name == family
        },
        "published": [recorded(fields, change) for change in PUBLISHED.get(family, ())],
        "random": found,
    }
    text = ",\n".join(f"{json.dumps(name)}: {listed(part)}" for name, part in parts.items())
    (HERE / family / "changes.json").write_text(f"{{\n{text}}}\n")


def listed(part: dict | list) -> str:
    """JSON with one change on a line."""
    if isinstance(part, list) and part:
        return "[\n" + ",\n".join(json.dumps(each) for each in part) + "]"
    return json.dumps(part)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    base = bases()
    known = {fields["model_type"]: defaults(fields["model_type"]) for fields in base.values()}
    for each in sys.argv[1:] or FAMILIES:
        record(each, base, known)
