"""`axcore convert` and `axcore export`."""

from __future__ import annotations

import argparse
import contextlib
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
    from axcore.train.checkpoint.initial import initial_arrays
    from axcore.train.checkpoint.model_folder import flat, like
    from axcore.train.checkpoint.saved_code import unregistered
    from axcore.train.files import new_folder
    from axcore_hf.checkpoint import Checkpoint
    from axcore_hf.initial import FromHF
    from axcore_hf.owners import GROUP

    folder = new_folder(given.folder)
    found = Checkpoint.open(given.source, tokenizer=given.tokenizer)
    if foreign := unregistered(found.model):
        raise AxcoreError(
            f"{given.source}: no other process could open the model folder, because {', '.join(foreign)} belongs to no "
            f"package that an installed distribution registers. Install it with an entry point in a group of axcore, "
            f"such as {GROUP}"
        )
    model = found.model.set(dtypes=DTypes(param=given.dtype, compute=given.dtype))
    _, params, state = abstract(model)
    arrays = initial_arrays(FromHF.Config(source=given.source), model, flat(params), flat(state), 0)
    files = {**found.files, PUBLISHED: (json.dumps(dict(found.raw), indent=2) + "\n").encode()}
    save_model(folder, model, like(params, arrays), like(state, arrays), tokenizer=found.tokenizer, files=files)
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
    parser.add_argument("--config", help="a config.json that describes the model (default: the folder's, or a new one)")
    parser.add_argument("--shard-gib", type=float, default=5.0, help="largest file size in GiB (default: 5)")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parser.add_argument("--tokenizer", help="a tokenizer.json that replaces the folder's own")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the tensors (default: as in the folder)")
    parser.add_argument(
        "--force",
        action="store_true",
        help="write the checkpoint even if its config.json describes a model with other outputs",
    )
    given = parser.parse_args(arguments)

    from axcore.module import abstract
    from axcore.train import ModelFolder
    from axcore.train.checkpoint.model_folder import flat
    from axcore.train.files import new_folder
    from axcore_hf import agreement, exporting, text_files
    from axcore_hf.families import family_of
    from axcore_hf.fields import Fields

    out = new_folder(given.out)
    if not given.shard_gib > 0:
        raise AxcoreError(f"--shard-gib must be positive, not {given.shard_gib}")
    found = ModelFolder.open(given.folder)
    model = _language_model(found.model, given.folder)
    raw, where = _description(found, model, given.config)
    fields = Fields(raw, where)
    family = family_of(fields)
    agreement.compared(family.read_config(fields), model).check(where, given.force)
    if given.tokenizer is not None:
        files = text_files.replaced(pathlib.Path(given.tokenizer).expanduser(), found.folder, model, raw)
    else:
        files = text_files.of_model(found)
    forms, state = (flat(tree) for tree in abstract(model)[1:])
    arrays, missing, _ = found.load(model, _in_dtype(forms, given.dtype), state, step=given.step)
    if missing:
        raise AxcoreError(f"{found.folder} lacks parameters of its model: {', '.join(missing[:8])}")
    size = int(given.shard_gib * exporting.GIB)
    exporting.write(out, family, model, arrays, raw, files=files, shard_bytes=size)
    print(f"{family.name} -> {out}")
    return 0


def _language_model(model: Any, folder: str) -> Any:
    """The config of the model without modules and number formats that only training uses.

    Raises:
        AxcoreError: it is not a CausalLM, or it has adapters.
    """
    from axcore.config import shown_type, walk
    from axcore.nn import CausalLM, without_numerics

    if not isinstance(model, CausalLM.Config):
        raise AxcoreError(f"{folder}: export requires a CausalLM, got {type(model).__qualname__}")
    if model.future:
        print("left out the modules in `future`, which only training uses", file=sys.stderr)
    for path, node in walk(model):
        if (adapter := getattr(node, "adapter", None)) is not None:
            raise AxcoreError(
                f"{folder}: model.{path}.adapter is {shown_type(type(adapter))}, but no published family has adapters. "
                f"Merge them into the weights first (axcore merge {folder} MERGED), then export MERGED."
            )
    model = model.set(future=())
    in_floats = without_numerics(model)
    if in_floats != model:
        print("left out the number formats of training: the checkpoint has the float weights", file=sys.stderr)
    return in_floats


def _description(found: Any, model: Any, given: str | None) -> tuple[dict[str, Any], str]:
    """The fields of a config.json for a model, and where they are from."""
    from axcore_hf import agreement, text_files
    from axcore_hf.checkpoint import Checkpoint
    from axcore_hf.describing import described
    from axcore_hf.fields import read_object
    from axcore_hf.initial import FromHF

    if given is not None or (found.folder / PUBLISHED).exists():
        file = pathlib.Path(given).expanduser() if given is not None else found.folder / PUBLISHED
        try:
            return read_object(file), str(file)
        except OSError as error:
            raise AxcoreError(f"{file}: {error.strerror}. Give a config.json that describes the model.") from error
    ids, initial = text_files.ids_of(found.tokenizer), getattr(found.cfg, "initial", None)
    if isinstance(initial, FromHF.Config):
        with contextlib.suppress(AxcoreError):  # the source may be gone, or the model may differ from it
            base = Checkpoint.open(initial.source)
            agreement.compared(base.model, model).check(initial.source, False)
            return {**base.raw, **ids}, initial.source
    seq_len = getattr(getattr(found.cfg, "input", None), "seq_len", None)
    return {**described(model, seq_len), **ids}, str(found.folder)


def _in_dtype(forms: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """The same shapes in another floating-point dtype."""
    import jax
    import jax.numpy as jnp

    def form(leaf: Any) -> jax.ShapeDtypeStruct:
        kept = dtype is None or not jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if kept else dtype)

    return {path: form(leaf) for path, leaf in forms.items()}
