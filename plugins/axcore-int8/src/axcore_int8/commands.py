"""`axcore quantize`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from axcore.config import AxcoreError


def quantize(arguments: Sequence[str]) -> int:
    """`axcore quantize MODEL FOLDER --use NAME[:KEY=VALUE,...]`."""
    parser = argparse.ArgumentParser(
        prog="axcore quantize",
        description="Adds numerics to a trained model, and writes a model folder with stored weights.",
    )
    parser.add_argument("model", help="a run folder or a model folder")
    parser.add_argument("folder", help="the model folder to write; it must not exist")
    parser.add_argument(
        "--use", required=True, metavar="NAME[:KEY=VALUE,...]", help="the numerics, such as int8:activation_scales=None"
    )
    parser.add_argument("--text", type=Path, help="a file on which static scales are measured")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the text to measure (default: 8192)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens in a row (default: 512)")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    given = parser.parse_args(arguments)

    import jax.numpy as jnp
    import numpy as np

    from axcore.module import abstract
    from axcore.numerics import calibrated, stored
    from axcore.plugin.features import use_text
    from axcore.train import ModelFolder, save_model
    from axcore.train.checkpoint.model_folder import flat, like
    from axcore.train.files import new_folder

    folder = new_folder(given.folder)
    found = ModelFolder.open(given.model)
    model = use_text(given.use)(found.model)
    _, shapes, forms = abstract(model)
    arrays, missing, _ = found.load(model, flat(shapes), flat(forms), step=given.step)
    if missing:
        raise AxcoreError(f"{found.folder} lacks parameters of its model: {', '.join(missing[:8])}")
    params = like(shapes, arrays)
    state = like(forms, {path: arrays.get(path, jnp.full(form.shape, jnp.nan)) for path, form in flat(forms).items()})
    if given.text is not None:
        if found.tokenizer is None:
            raise AxcoreError(f"{found.folder} has no tokenizer, so --text cannot be read; calibrate in Python instead")
        ids = np.asarray(found.tokenizer.build().encode(given.text.read_bytes()))[: given.tokens]
        rows = len(ids) // given.seq_len
        if not rows:
            raise AxcoreError(f"{given.text} has {len(ids)} tokens, fewer than --seq-len {given.seq_len}")
        state = calibrated(model, params, state, list(ids[: rows * given.seq_len].reshape(rows, 1, given.seq_len)))
    model, codes = stored(model, params)
    forms = abstract(model)[2]  # without the histories of training, such as those of delayed scaling
    state = like(forms, {path: leaf for path, leaf in flat(state).items() if path in flat(forms)})
    if uncalibrated := [path for path, leaf in flat(state).items() if np.isnan(leaf).any()]:
        raise AxcoreError(f"{uncalibrated[0]} and others must be measured; pass --text FILE")
    tokenizer, files = found.tokenizer, None
    if hasattr(tokenizer, "packed"):
        tokenizer, files = tokenizer.packed()
    save_model(folder, model, codes, state, tokenizer=tokenizer, files=files)
    print(f"quantized {given.model} -> {given.folder}")
    return 0
