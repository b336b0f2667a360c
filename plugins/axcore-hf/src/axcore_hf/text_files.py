"""The tokenizer of an exported model."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from axcore.train import ModelFolder
from axcore.train.data import ByteTokenizer
from axcore_hf.byte_level import byte_level_files
from axcore_hf.checkpoint import checked
from axcore_hf.tokenizer import GENERATION, read_files, replacing


def of_model(found: ModelFolder) -> dict[str, bytes]:
    """The text files of an export, by name: those of the model folder and those of its tokenizer.

    A tokenizer from another package takes part if its config has the method `packed` (see `axcore.train.save_model`).
    If it has none, the export has no tokenizer, and a message on stderr says so.
    """
    tokenizer, own = found.tokenizer, read_files(found.folder)
    if isinstance(tokenizer, ByteTokenizer.Config):
        return {**own, **byte_level_files()}
    if hasattr(tokenizer, "packed"):
        return {**own, **tokenizer.packed()[1]}
    if tokenizer is not None:
        kind = type(tokenizer).__qualname__.removesuffix(".Config")
        print(f"{kind} has no tokenizer.json, so the export has no tokenizer: give --tokenizer FILE", file=sys.stderr)
    return own


def replaced(file: pathlib.Path, folder: pathlib.Path, model: Any, raw: Mapping[str, Any]) -> dict[str, bytes]:
    """The text files of an export with another `tokenizer.json`.

    Raises:
        AxcoreError: `file` is not a tokenizer, or does not fit the model.
    """
    own = read_files(folder)
    checked(file, model, raw, own.get(GENERATION))
    return replacing(file, own)


def ids_of(tokenizer: Any) -> dict[str, Any]:
    """The ids in a `config.json` that belong to a tokenizer's config."""
    if tokenizer is None:
        return {}
    ends = list(tokenizer.build().eos_ids)
    found: dict[str, Any] = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    if isinstance(tokenizer, ByteTokenizer.Config):
        found["bos_token_id"] = ends[0]
    return found
