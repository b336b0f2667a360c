"""`axcore adapter` and `axcore merge`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from axcore.config import AxcoreError


def adapter(arguments: Sequence[str]) -> int:
    """`axcore adapter RUN FOLDER`."""
    parser = argparse.ArgumentParser(
        prog="axcore adapter",
        description="Writes the LoRA and DoRA adapters of a run to a folder, without the weights of the model. Engines "
        "load such folders while they run. Also converts from and to the PEFT format.",
    )
    parser.add_argument("run", help="a run folder or a model folder with adapters, or a PEFT folder")
    parser.add_argument("folder", help="the folder to write; it must not exist")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parser.add_argument(
        "--base",
        metavar="MODEL",
        help="the folder or the recipe of the model that a PEFT adapter belongs to; only its config is read",
    )
    parser.add_argument("--peft", action="store_true", help="write the PEFT format, for transformers (LoRA only)")
    given = parser.parse_args(arguments)

    from axcore.cli.compose import compose, is_folder
    from axcore.config import has_field
    from axcore.train import ModelFolder
    from axcore.train.files import new_folder
    from axcore_lora.adapter import Adapter
    from axcore_lora.peft import is_peft

    folder, model = new_folder(given.folder), None
    if given.base is not None:
        if not is_peft(given.run):
            ModelFolder.open(given.run)  # raises if it is no model folder either
            raise AxcoreError(f"--base {given.base} has no effect: {given.run} has the config of its model. Omit it")
        if is_folder(given.base):
            model = ModelFolder.open(given.base).model
        else:
            cfg = compose(given.base, [])
            model = cfg.model if has_field(cfg, "model") else cfg
    adapter = Adapter.read(given.run, step=given.step, model=model)
    if given.peft:
        adapter.save_peft(folder)
    else:
        adapter.save(folder)
    print(f"wrote the adapters of {given.run} -> {given.folder}")
    return 0


def merge(arguments: Sequence[str]) -> int:
    """`axcore merge RUN FOLDER`."""
    parser = argparse.ArgumentParser(
        prog="axcore merge",
        description="Merges the LoRA and DoRA adapters of a run into its weights, and writes a model folder.",
    )
    parser.add_argument("run", help="a run folder or a model folder with adapters")
    parser.add_argument("folder", help="the model folder to write; it must not exist")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    given = parser.parse_args(arguments)

    from axcore.module import abstract
    from axcore.train import ModelFolder, save_model
    from axcore.train.checkpoint.model_folder import flat, like
    from axcore.train.files import new_folder
    from axcore_lora import merging

    folder = new_folder(given.folder)
    found = ModelFolder.open(given.run)
    _, params, state = abstract(found.model)
    arrays, missing, _ = found.load(found.model, flat(params), flat(state), step=given.step)
    if missing:
        raise AxcoreError(f"{found.folder} lacks parameters of its model: {', '.join(missing[:8])}")
    merged = merging.merge(found.cfg, like(params, arrays))
    tokenizer, files = found.tokenizer, None
    if hasattr(tokenizer, "packed"):
        tokenizer, files = tokenizer.packed()
    save_model(folder, merged.cfg, merged.params, like(state, arrays), tokenizer=tokenizer, files=files)
    print(f"merged the adapters of {given.run} -> {given.folder}")
    return 0
