"""Writes the arrays of a model as a `transformers` checkpoint."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from axcore.config import AxcoreError
from axcore.nn import by_layer
from axcore.train.files import new_folder
from axcore_hf.family import Family, Match, matches
from axcore_hf.sources import INDEX, SINGLE
from axcore_hf.vocabulary import unpadded

GIB = 2**30


def write(
    folder: pathlib.Path,
    family: Family,
    cfg: Any,
    arrays: Mapping[str, Any],
    raw: Mapping[str, Any],
    *,
    files: Mapping[str, bytes] | None = None,
    shard_bytes: int = 5 * GIB,
) -> None:
    """Writes a checkpoint atomically, with the tensors of only one file in memory at a time.

    Args:
        cfg: the model's config.
        arrays: the parameters and other Variables of the model, by path.
        raw: the fields of config.json.
        files: contents of other files, such as a tokenizer, by name.

    Raises:
        AxcoreError: the folder exists or cannot be written, or a parameter has no corresponding tensor.
    """
    folder = new_folder(folder)
    arrays = unpadded(cfg, arrays)
    places = by_layer(cfg, arrays)
    shapes = {name: tuple(arrays[path].shape[len(index) :]) for name, (path, index) in places.items()}
    found = [next(each for each in some if each.rule.can_write) for some in matches(family, cfg, shapes)]
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_tensors(partial, found, places, arrays, shard_bytes)
        described = _described(raw, str(arrays["embedding.weight"].dtype))
        (partial / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
        for name, content in (files or {}).items():
            (partial / name).write_bytes(content)
        partial.rename(folder)
    except OSError as error:
        raise AxcoreError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _described(raw: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The fields for the written tensors: without quantization, in this dtype."""
    named = {name: dtype for name in ("dtype", "torch_dtype") if name in raw}
    return {name: value for name, value in {**raw, **named}.items() if name != "quantization_config"}


def _write_tensors(
    folder: pathlib.Path,
    found: list[Match],
    places: Mapping[str, tuple[str, tuple[int, ...]]],
    arrays: Mapping[str, Any],
    shard_bytes: int,
) -> None:
    def tensors(match: Match) -> dict[str, Any]:
        ours = [np.asarray(arrays[path][index]) for path, index in (places[name] for name in match.ours)]
        made = match.rule.transform.write(ours)
        return {name: np.ascontiguousarray(each) for name, each in zip(match.theirs, made, strict=True)}

    shards = _shards(found, places, arrays, shard_bytes)
    index: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        held = {name: tensor for match in shard for name, tensor in tensors(match).items()}
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        safetensors.numpy.save_file(held, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o666 & folder.stat().st_mode)  # safetensors creates files that only the owner can read
        index |= dict.fromkeys(held, file)
        total += sum(tensor.nbytes for tensor in held.values())
    if len(shards) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")


def _shards(
    found: list[Match], places: Mapping[str, tuple[str, tuple[int, ...]]], arrays: Mapping[str, Any], most: int
) -> list[list[Match]]:
    """Groups of matches of at most the given size in bytes. A larger match forms its own group."""
    shards: list[list[Match]] = [[]]
    held = 0
    for match in found:
        sizes = zip(match.ours, match.shapes, strict=True)
        size = sum(int(np.prod(shape)) * arrays[places[name][0]].dtype.itemsize for name, shape in sizes)
        if shards[-1] and held + size > most:
            shards.append([])
            held = 0
        shards[-1].append(match)
        held += size
    return shards
