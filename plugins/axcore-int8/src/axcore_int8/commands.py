"""`axcore quantize`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axcore.config import AxcoreError, walk

if TYPE_CHECKING:
    from axcore.module import Tree
    from axcore.train import ModelFolder


def quantize(arguments: Sequence[str]) -> int:
    """`axcore quantize MODEL FOLDER --use NAME[:KEY=VALUE,...]`."""
    parser = argparse.ArgumentParser(
        prog="axcore quantize",
        description="Rounds the weights of a trained model and writes them to a model folder, which `axcore generate` "
        "reads.",
    )
    parser.add_argument("model", help="a run folder or a model folder with float weights")
    parser.add_argument("folder", help="the model folder to write; it must not exist")
    parser.add_argument(
        "--use",
        required=True,
        metavar="NAME[:KEY=VALUE,...]",
        help="the numerics, such as int8:activation_scales=None or int4",
    )
    parser.add_argument("--text", type=Path, help="the text on which static scales are measured")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the text to measure (default: 8192)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens in a row (default: 512)")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    given = parser.parse_args(arguments)

    import jax

    from axcore.module import abstract, initializer
    from axcore.nn import without_numerics
    from axcore.numerics import calibrated, require_calibrated, stored
    from axcore.plugin.features import use_text
    from axcore.train import ModelFolder, save_model
    from axcore.train.checkpoint.model_folder import flat, like
    from axcore.train.files import new_folder

    folder = new_folder(given.folder)
    found = ModelFolder.open(given.model)
    _check_float(found)
    in_floats = without_numerics(found.model)
    model = use_text(given.use)(in_floats)
    rows = _rows(found, given.text, given.tokens, given.seq_len) if given.text is not None else []
    params = _params(found, model, given.step, given.use)
    small, codes = stored(model, params)
    fn, _, forms = abstract(small)
    # Without the histories of FP8 training, whose length may differ.
    arrays, *_ = found.load(model, {}, flat(forms), step=given.step)
    initial = jax.jit(lambda key: initializer(model)(key)[1])(jax.random.key(0))
    state = like(initial, flat(initial) | arrays)
    if rows:
        state = calibrated(model, params, state, rows)
    state = like(forms, flat(state))
    require_calibrated(fn.bind(codes, state), "model")
    tokenizer, files = found.tokenizer, None
    if hasattr(tokenizer, "packed"):
        tokenizer, files = tokenizer.packed()
    save_model(folder, small, codes, state, tokenizer=tokenizer, files=files)
    replaced = "" if in_floats == found.model else f"; {given.use} replaces the number formats of training"
    print(f"quantized {given.model} -> {given.folder}{replaced}")
    return 0


def _check_float(found: ModelFolder) -> None:
    for path, node in walk(found.model):
        if getattr(node, "stored", False):
            raise AxcoreError(
                f"{found.folder} is quantized already (model.{path}). Quantize the folder with float weights instead"
            )


def _rows(found: ModelFolder, text: Path, tokens: int, seq_len: int) -> list[Any]:
    """Token ids of the text, [1, seq_len] each."""
    import numpy as np

    from axcore.train.files import os_reason

    if not 1 <= seq_len <= tokens:
        raise AxcoreError(f"--seq-len {seq_len} must be from 1 to --tokens {tokens}")
    if found.tokenizer is None:
        raise AxcoreError(
            f"{found.folder} has no tokenizer, so --text cannot be read. Calibrate in Python with "
            f"axcore.numerics.calibrated"
        )
    try:
        content = text.read_bytes()
    except OSError as error:
        raise AxcoreError(f"cannot read --text {text}: {os_reason(error)}") from error
    ids = np.asarray(found.tokenizer.build().encode(content))
    if len(ids) < seq_len:
        raise AxcoreError(f"--text {text} has {len(ids)} tokens, fewer than --seq-len {seq_len}. Reduce --seq-len")
    count = min(len(ids), tokens) // seq_len
    return list(ids[: count * seq_len].reshape(count, 1, seq_len))


def _params(found: ModelFolder, model: Any, step: int | None, use: str) -> Tree:  # Any: the Config of any model
    from axcore.module import abstract
    from axcore.train.checkpoint.model_folder import flat, like

    shapes = abstract(model)[1]
    arrays, missing, _ = found.load(model, flat(shapes), {}, step=step)
    if missing:
        raise AxcoreError(
            f"--use {use} adds parameters that {found.folder} does not have: {', '.join(missing[:8])}. It must name "
            f"numerics, such as int8 or int4"
        )
    return like(shapes, arrays)
