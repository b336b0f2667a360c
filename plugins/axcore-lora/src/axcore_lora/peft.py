"""Adapters in the format of Hugging Face's PEFT: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from axcore.config import AxcoreError
from axcore.train.files import new_folder
from axcore_lora.adapter import Adapter
from axcore_lora.layer import DoRA, LoRA, scale
from axcore_lora.layered import LayerAdapter, joined, linears, split, without_adapters

if TYPE_CHECKING:
    from axcore_hf.low_rank import Factors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
READ = ("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "bias")
"""Fields that are read."""
NO_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
        # the tensors tell which modules have adapters
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
        # how adapters were initialized, and settings of variants that are off
        *("eva_config", "loftq_config", "megatron_config", "megatron_core", "qalora_group_size", "runtime_config"),
    }
)
"""Fields that do not change what a saved adapter computes."""
INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the weights of the base model alone."""
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max) / 2**16
"""Limits of numbers: alpha times the square root of a rank is a float32."""
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


def is_peft(folder: str | pathlib.Path) -> bool:
    """Whether a folder has a PEFT adapter."""
    return pathlib.Path(folder, CONFIG).is_file()


def read(folder: str | pathlib.Path, model: Any) -> Adapter:
    """Reads a PEFT LoRA adapter.

    Args:
        folder: the folder with `adapter_config.json`.
        model: config of the model that it belongs to, without adapters. Its layers may be stacked in any way.

    Raises:
        AxcoreError: a file is missing or damaged, the adapter is not plain LoRA, or it does not fit the model.
    """
    folder = pathlib.Path(folder)
    fields, low_rank = _fields(folder / CONFIG), _low_rank()
    factors = _factors(folder / TENSORS)
    names = low_rank.LinearNames(model, linears(model))
    layers: dict[str, LayerAdapter] = {}
    for name, ((a, b), modules) in names.read(factors, str(folder / TENSORS)).items():
        configs = [_config(fields, module, factors[module].a.shape[0], folder / CONFIG) for module in modules]
        if any(cfg != configs[0] for cfg in configs):
            raise AxcoreError(f"{folder / CONFIG}: the experts from {modules[0]} on differ in alpha. Use one alpha")
        a, b = _capped(a, b)
        layers[name] = LayerAdapter(configs[0], {"a": a, "b": b})
    return joined(model, layers)


def write(adapter: Adapter, folder: str | pathlib.Path) -> pathlib.Path:
    """Writes LoRA adapters in the PEFT format.

    Args:
        adapter: the adapters.
        folder: the folder; it must not exist.

    Raises:
        AxcoreError: an adapter is DoRA or one of experts, the model is not of a published family, or the folder exists
            or cannot be written.
    """
    folder, low_rank = new_folder(folder), _low_rank()
    layers = split(adapter)
    if dora := [name for name, each in layers.items() if isinstance(each.cfg, DoRA.Config)]:
        raise AxcoreError(
            f"{dora[0]} has a DoRA adapter, whose norms have another form in PEFT. Merge it (axcore merge) and export "
            f"the merged model, or train with dora=False"
        )
    given = {name: low_rank.Factors(_f32(each.arrays["a"]), _f32(each.arrays["b"])) for name, each in layers.items()}
    scales = {scale(each.cfg) for each in layers.values()}
    if len(scales) > 1:  # the factors have the scales
        given = {name: each._replace(b=each.b * np.float32(scale(layers[name].cfg))) for name, each in given.items()}
    factor = scales.pop() if len(scales) == 1 else 1.0
    model = without_adapters(adapter.cfg)
    names = low_rank.LinearNames(model, linears(model))
    modules = names.write(given)
    ranks = {module: each.a.shape[0] for module, each in modules.items()}
    rank = max(ranks.values(), key=list(ranks.values()).count)
    others = {module: each for module, each in ranks.items() if each != rank}
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": names.have_inputs_first(modules),
        "inference_mode": True,
        "lora_dropout": max(each.cfg.dropout for each in layers.values()),
        "r": rank,
        "lora_alpha": _alpha(factor, rank),
        "rank_pattern": others,
        "alpha_pattern": {module: _alpha(factor, each) for module, each in others.items()},
        "target_modules": sorted(modules),
    }
    tensors = {f"{PREFIX}{module}.lora_A.weight": each.a for module, each in modules.items()}
    tensors |= {f"{PREFIX}{module}.lora_B.weight": each.b for module, each in modules.items()}
    low_rank.save(folder, {CONFIG: json.dumps(fields, indent=2) + "\n"}, TENSORS, tensors)
    return folder


def _low_rank() -> Any:
    """`axcore_hf.low_rank`, which knows the names of published models.

    Raises:
        AxcoreError: axcore-hf is not installed.
    """
    try:
        from axcore_hf import low_rank
    except ModuleNotFoundError as error:
        if error.name != "axcore_hf":
            raise
        raise AxcoreError("PEFT adapters require the names of published models. pip install axcore-hf") from error
    return low_rank


def _fields(file: pathlib.Path) -> dict[str, Any]:
    """The fields of an `adapter_config.json`.

    Raises:
        AxcoreError: it is not the config of a plain LoRA adapter.
    """
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AxcoreError(f"{file}: {error}. Give a folder that PEFT has written") from error
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        kind = fields.get("peft_type") if isinstance(fields, dict) else fields
        raise AxcoreError(f"{file}: peft_type={kind!r} is not supported, only 'LORA'. {_MERGE}")
    for name, value in fields.items():
        if name in (*READ, *NO_EFFECT) or (name == "init_lora_weights" and value in INITIAL):
            continue
        if value:
            raise AxcoreError(f"{file}: {name}={value!r} is not supported. {_REMEDIES.get(name, _MERGE)}")
    if fields.get("bias", "none") != "none":
        raise AxcoreError(f"{file}: bias={fields['bias']!r} is not supported, only 'none'. {_MERGE}")
    for name in ("r", "lora_alpha"):
        if not _is_number(fields.get(name)):
            raise AxcoreError(f"{file}: {name}={fields.get(name)!r} must be a positive number. Save the adapter again")
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = fields.get(name) or {}
        if not isinstance(pattern, dict) or not all(map(_is_number, pattern.values())):
            raise AxcoreError(
                f"{file}: {name}={pattern!r} must map names of modules to positive numbers. Save the adapter again"
            )
        for key in pattern:
            try:
                re.compile(_pattern(key))
            except re.error as error:
                raise AxcoreError(
                    f"{file}: {name}: {key!r} is not a regular expression ({error}). Correct it, or save the adapter "
                    f"again"
                ) from error
    dropout = fields.get("lora_dropout") or 0.0
    if not (_is_number(dropout) or dropout == 0) or not dropout < 1:
        raise AxcoreError(f"{file}: lora_dropout={dropout!r} must be a number of at least 0 and below 1. Correct it")
    return fields


_MERGE = "Merge the adapter with PEFT (merge_and_unload), and convert the merged model"
_REMEDIES = {
    "use_dora": "Merge the adapter with PEFT (merge_and_unload), since DoRA also changes the norms of the weights",
    "modules_to_save": "The adapter also has whole layers. " + _MERGE,
    "init_lora_weights": "It changes the weights of the base model. Save the adapter with PEFT's option "
    "path_initial_model_for_weight_conversion",
}


def _is_number(value: object) -> bool:
    """Whether a field is a positive number, also in float32."""
    return isinstance(value, int | float) and not isinstance(value, bool) and SMALLEST <= value <= LARGEST


def _pattern(key: str) -> str:
    """The regular expression of the names of modules for a key of `rank_pattern` or `alpha_pattern`, as in PEFT."""
    return rf"(.*\.)?({key})$"


def _config(fields: Mapping[str, Any], module: str, rank: int, file: pathlib.Path) -> LoRA.Config:
    """The config of the adapter of a module, whose A has this rank.

    Raises:
        AxcoreError: the config has another rank.
    """

    def of(pattern: str, default: Any) -> Any:
        found = fields.get(pattern) or {}
        key = next((key for key in found if re.match(_pattern(key), module)), None)
        return default if key is None else found[key]

    if (expected := of("rank_pattern", fields["r"])) != rank:
        raise AxcoreError(
            f"{file}: {module} has rank {expected} there, but {rank} in {TENSORS}. Save the adapter again"
        )
    alpha = float(of("alpha_pattern", fields["lora_alpha"]))
    if fields.get("use_rslora"):
        alpha *= math.sqrt(rank)  # PEFT then divides by the square root of the rank (arXiv 2312.03732)
    return LoRA.Config(rank=rank, alpha=alpha, dropout=float(fields.get("lora_dropout") or 0.0))


def _factors(file: pathlib.Path) -> dict[str, Factors]:
    """A and B of each module.

    Raises:
        AxcoreError: the file is missing or damaged, or has other tensors.
    """
    low_rank = _low_rank()
    if not file.exists():
        raise AxcoreError(f"{file} does not exist. Save the adapter with safe_serialization=True, the default of PEFT")
    found: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for name, array in low_rank.tensors(file).items():
        if ".base_layer." in name:
            continue  # PEFT adds the frozen weights of heads that have an adapter
        match = _TENSOR.fullmatch(name.removeprefix(PREFIX))
        if match is None:
            kind = "an embedding" if ".lora_embedding_" in name else "another kind"
            raise AxcoreError(f"{file}: the tensor {name} is of {kind}, not LoRA of a linear layer. {_MERGE}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise AxcoreError(f"{file}: {name} has the dtype {array.dtype}, expected floats. Save the adapter again")
        with np.errstate(over="ignore"):  # the next check finds it
            array = _f32(array)
        if not np.isfinite(array).all():
            raise AxcoreError(f"{file}: {name} has values that are not finite in float32. Check the training run")
        factors = found.setdefault(match["module"], {})
        if match["factor"] in factors:
            raise AxcoreError(f"{file} has {name} with and without {PREFIX!r}. Save the adapter again")
        factors[match["factor"]] = array
    if half := [module for module, each in found.items() if len(each) < 2]:
        raise AxcoreError(f"{file}: {half[0]} has only one of lora_A and lora_B. Save the adapter again")
    if not found:
        raise AxcoreError(f"{file} has no tensors. Save the adapter again")
    return {module: low_rank.Factors(each["A"], each["B"]) for module, each in found.items()}


def _capped(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Factors with the same product and at most the rank that `LoRA` has: the smaller width of the weight.

    Args:
        a: [..., in, rank].
        b: [..., rank, out].
    """
    into, out = a.shape[-2], b.shape[-1]
    if a.shape[-1] <= min(into, out):
        return a, b
    product = np.matmul(a, b, dtype=np.float64).astype(np.float32)
    eye = np.broadcast_to(np.eye(min(into, out), dtype=np.float32), (*a.shape[:-2], *[min(into, out)] * 2))
    return (product, eye) if out <= into else (eye, product)


def _alpha(factor: float, rank: int) -> float:
    alpha = factor * rank
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha


def _f32(array: Any) -> np.ndarray[Any, Any]:
    return np.asarray(array, np.float32)
