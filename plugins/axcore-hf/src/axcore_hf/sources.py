"""Sources that read tensors one at a time."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import struct
from collections.abc import Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import safetensors

from axcore.config import AxcoreError
from axcore.plugin.attribution import described
from axcore_hf.transforms import Array

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
AGAIN = "Download it again; in a clone with Git, run `git lfs pull`."

DTYPES: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class Source(Protocol):
    """Tensors by name."""

    @property
    def where(self) -> str: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> Array:
        """One tensor."""
        ...


class Safetensors:
    """The tensors of a folder: from `model.safetensors`, or from the files that its index lists.

    Tensors are read from the files instead of memory-mapped, so that they do not stay in memory after use.

    Args:
        folder: the folder.
        single: the name of another file to read in place of `model.safetensors`, which has no index.

    Raises:
        AxcoreError: a file is missing, truncated or of another format, or the index and the files differ.
    """

    def __init__(self, folder: pathlib.Path, single: str = SINGLE):
        self.where = str(folder)
        self._places: dict[str, tuple[pathlib.Path, str, int, int, tuple[int, ...]]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        listed = _index(folder) if single == SINGLE else {}
        for file in sorted({folder / name for name in listed.values()}) if listed else [folder / single]:
            for name, entry in _header(file).items():
                if listed and listed.get(name) != file.name:
                    raise AxcoreError(f"{folder / INDEX} does not list {name!r}, which is in {file.name}")
                start, end = entry["data_offsets"]
                shapes[name] = tuple(entry["shape"])
                self._places[name] = (file, entry["dtype"], start, end, shapes[name])
        if gone := sorted(listed.keys() - shapes.keys()):
            raise AxcoreError(f"{folder / INDEX} lists tensors that its files do not have: {', '.join(gone[:8])}")
        # 8-bit floats have a scale per block, which is part of their encoding rather than a separate tensor.
        scales = {f"{name}_scale_inv" for name, (_, dtype, *_) in self._places.items() if dtype.startswith("F8")}
        self.shapes = {name: shape for name, shape in shapes.items() if name not in scales}

    def read(self, name: str) -> Array:
        found, scale = self._array(name), f"{name}_scale_inv"
        if scale not in self._places or scale in self.shapes:
            return found
        return _unscaled(found, self._array(scale), f"{self.where}: {scale}")

    def _array(self, name: str) -> Array:
        file, dtype, start, end, shape = self._places[name]
        if dtype not in DTYPES:
            raise AxcoreError(f"{file}: {name} has the dtype {dtype}. Known: {', '.join(DTYPES)}")
        with file.open("rb") as opened:
            opened.seek(start)
            array = np.fromfile(opened, np.uint8, end - start)
        shaped: Array = array.view(DTYPES[dtype]).reshape(shape)
        return shaped


class LanguagePart:
    """The tensors of the language model in a multimodal model, named as in a separate language model.

    Attributes:
        left_out: the parts that the other tensors belong to.
    """

    def __init__(self, whole: Source):
        self.where, self._whole = whole.where, whole
        names = {name: language_name(name) for name in whole.shapes}
        self._names = {alone: name for name, alone in names.items() if alone is not None}
        self.shapes = {alone: whole.shapes[name] for alone, name in self._names.items()}
        parts = {name.removeprefix("model.").partition(".")[0] for name, alone in names.items() if alone is None}
        self.left_out = tuple(sorted(parts))

    def read(self, name: str) -> Array:
        return self._whole.read(self._names[name])


def language_name(name: str) -> str | None:
    """The name of a tensor within the language model, or None. In files, its prefix contains `language_model`."""
    if name.startswith("language_model."):
        return name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        return f"model.{name.removeprefix('model.language_model.')}"
    return name if name == "lm_head.weight" else None


def _index(folder: pathlib.Path) -> dict[str, str]:
    """Tensor -> file. Empty if there is a single file, which takes precedence, as in `transformers`."""
    if (folder / SINGLE).exists():
        return {}
    try:
        weights = json.loads((folder / INDEX).read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in weights.items()}
    except FileNotFoundError:
        raise AxcoreError(f"{folder} has neither {SINGLE} nor {INDEX}. Download the files in that format.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AxcoreError(f"{folder / INDEX} is not an index of a checkpoint: {described(error)}. {AGAIN}") from error


def _header(file: pathlib.Path) -> dict[str, Any]:
    """Dtype, shape and absolute byte range of each tensor, by name. Raises if the file is incomplete."""
    try:
        with safetensors.safe_open(file, "numpy"):  # checks that the header and the size agree
            pass
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
    except FileNotFoundError as error:
        raise AxcoreError(f"{file} is missing, but the index lists it. {AGAIN}") from error
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise AxcoreError(f"{file} is truncated or not a safetensors file: {error}. {AGAIN}") from error
    header.pop("__metadata__", None)
    for entry in header.values():
        entry["data_offsets"] = [8 + length + offset for offset in entry["data_offsets"]]
    return dict(header)


def _unscaled(weight: Array, scale: Array, where: str) -> Array:
    """8-bit floats times the scales of their 128 x 128 blocks (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)."""
    expected = tuple(-(-size // 128) for size in weight.shape)
    if weight.ndim != 2 or scale.shape != expected:
        raise AxcoreError(
            f"{where} has the shape {scale.shape}, but {weight.shape} in blocks of 128 x 128 requires {expected}"
        )
    rows, columns = weight.shape
    factors = scale.repeat(128, axis=0)[:rows].repeat(128, axis=1)[:, :columns]
    return weight.astype(np.float32) * factors


class Gguf:
    """The tensors of a GGUF file, dequantized to float32 one at a time.

    Raises:
        AxcoreError: the file is truncated or of another format.
    """

    def __init__(self, file: pathlib.Path):
        import gguf  # importing takes half a second

        self.where = str(file)
        try:
            self._reader = gguf.GGUFReader(str(file))
        except FileNotFoundError as error:
            raise AxcoreError(f"{file} does not exist") from error
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise AxcoreError(f"{file} is truncated or not a GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.shapes = {name: tuple(map(int, tensor.shape[::-1])) for name, tensor in self._tensors.items()}
        self.fields = {name: self._field(name) for name in self._reader.fields}

    def _field(self, name: str) -> Any:
        with contextlib.suppress(Exception):  # ignore unused metadata of unknown kinds
            return self._reader.fields[name].contents()
        return None

    def read(self, name: str) -> Array:
        import gguf

        tensor = self._tensors[name]
        found: Array = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(self.shapes[name])
        return found


def is_ignored(name: str, patterns: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)
