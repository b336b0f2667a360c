"""`axcore convert` and `axcore export`."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from axcore.config import AxcoreError

PUBLISHED = "published_config.json"
"""File in a model folder with the fields of the published config."""
DTYPES = ("float32", "bfloat16", "float16")


def convert(arguments: Sequence[str]) -> int:
    """`axcore convert SOURCE FOLDER`."""
    parser = argparse.ArgumentParser(
        prog="axcore convert", description="Converts a transformers checkpoint or a GGUF file to a model folder."
    )
    parser.add_argument("source", help="hf:DIR, gguf:FILE or gguf:package:NAME")
    parser.add_argument("folder", help="the model folder to write; it must not exist")
    parser.add_argument("--tokenizer", help="a tokenizer.json that replaces the checkpoint's own")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the parameters (default: float32)")
    given = parser.parse_args(arguments)

    from axcore import DTypes
    from axcore.module import abstract
    from axcore.train import save_model
    from axcore.train.checkpoint.initial import gathered
    from axcore.train.checkpoint.model_folder import flat, like
    from axcore_hf.checkpoint import Checkpoint
    from axcore_hf.initial import FromHF

    if pathlib.Path(given.folder).exists():
        raise AxcoreError(f"{given.folder} already exists. Give another folder, or remove it.")
    found = Checkpoint.open(given.source, tokenizer=given.tokenizer)
    model = found.model.set(dtypes=DTypes(param=given.dtype, compute=given.dtype))
    _, params, state = abstract(model)
    arrays = gathered(FromHF.Config(source=given.source), model, flat(params), flat(state), 0)
    files = {**found.files, PUBLISHED: (json.dumps(dict(found.raw), indent=2) + "\n").encode()}
    save_model(given.folder, model, like(params, arrays), like(state, arrays), tokenizer=found.tokenizer, files=files)
    count = sum(arrays[path].size for path in flat(params))
    print(f"{found.family.name}: {count:,} parameters in {given.dtype} -> {given.folder}")
    if found.left_out:
        print(f"converted only the language model, without {', '.join(found.left_out)}", file=sys.stderr)
    if found.tokenizer is None:
        print("no tokenizer found: to generate text, convert with --tokenizer FILE", file=sys.stderr)
    return 0


def export(arguments: Sequence[str]) -> int:
    """`axcore export FOLDER DIR`."""
    parser = argparse.ArgumentParser(
        prog="axcore export", description="Converts a model folder or a run folder to a transformers checkpoint."
    )
    parser.add_argument("folder", help="a model folder or a run folder")
    parser.add_argument("out", help="the checkpoint to write; it must not exist")
    parser.add_argument("--config", help="a config.json that describes the model, if the folder has none")
    parser.add_argument("--shard-gib", type=float, default=5.0, help="largest file size in GiB (default: 5)")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parser.add_argument("--tokenizer", help="a tokenizer.json that replaces the folder's own")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the tensors (default: as in the folder)")
    given = parser.parse_args(arguments)

    from axcore.module import abstract
    from axcore.train import ModelFolder
    from axcore.train.checkpoint.model_folder import flat
    from axcore_hf import agreement, exporting
    from axcore_hf.checkpoint import TOKENIZER_FILES
    from axcore_hf.families import family_of
    from axcore_hf.fields import Fields

    found = ModelFolder.open(given.folder)
    raw = _published(found.folder, given.config)
    fields = Fields(raw, given.config or str(found.folder / PUBLISHED))
    family = family_of(fields)
    published = family.read_config(fields)
    agreement.check_shapes(published, found.model, fields.where)
    if lines := agreement.differences(published, found.model):
        print(f"{fields.where} differs from the model in:{agreement.listed(lines)}", file=sys.stderr)
    if not given.shard_gib > 0:
        raise AxcoreError(f"--shard-gib must be positive, not {given.shard_gib}")
    params, state = (_in_dtype(flat(tree), given.dtype) for tree in abstract(found.model)[1:])
    arrays, missing, _ = found.load(found.model, params, state, step=given.step)
    if missing:
        raise AxcoreError(f"{found.folder} lacks parameters of its model: {', '.join(missing[:8])}")
    files = {name: (found.folder / name).read_bytes() for name in TOKENIZER_FILES if (found.folder / name).exists()}
    out = pathlib.Path(given.out).expanduser().absolute()
    size = int(given.shard_gib * exporting.GIB)
    exporting.write(out, family, found.model, arrays, raw, files=files, shard_bytes=size)
    print(f"{family.name} -> {out}")
    return 0


def _in_dtype(forms: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """The same shapes in another floating-point dtype."""
    import jax
    import jax.numpy as jnp

    def form(leaf: Any) -> jax.ShapeDtypeStruct:
        kept = dtype is None or not jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if kept else dtype)

    return {path: form(leaf) for path, leaf in forms.items()}


def _published(folder: pathlib.Path, given: str | None) -> dict[str, Any]:
    file = pathlib.Path(given) if given else folder / PUBLISHED
    try:
        raw = json.loads(file.read_bytes())
    except OSError as error:
        raise AxcoreError(
            f"{file}: {error.strerror}. Exporting a model that axcore did not convert requires --config FILE, a "
            f"config.json that describes the model."
        ) from error
    except ValueError as error:
        raise AxcoreError(f"{file} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise AxcoreError(f"{file} is not a JSON object")
    return raw
