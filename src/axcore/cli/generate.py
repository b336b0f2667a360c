"""`axcore generate MODEL --prompt TEXT`."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from typing import Any

from axcore.cli.compose import add_edits, compose
from axcore.config import AxcoreError, ConfigError, under
from axcore.plugin import PluginError


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="go on from a prompt",
        description="Goes on from a prompt with a trained model: that of a run's folder, of a folder that "
        "`axcore convert` wrote, or of a recipe that brings weights.",
    )
    parser.add_argument("model", help="a folder, or a recipe as `axcore recipes` lists it")
    parser.add_argument("--prompt", required=True, help="the text to go on from")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate at most (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws, where the temperature is not 0")
    parser.add_argument("--dtype", help="number type of weights and products, as in bfloat16 (default: the model's)")
    add_edits(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import jax

    from axcore.infer import Generator
    from axcore.nn import ContiguousCache

    if not 1 <= arguments.tokens < 2**31:
        raise AxcoreError(f"--tokens must be from 1 to 2**31 - 1, not {arguments.tokens}")
    if not 0 <= arguments.seed < 2**32:
        raise AxcoreError(f"--seed must be from 0 to 2**32 - 1, not {arguments.seed}")
    model, tokenizer = _model(arguments)
    text = arguments.prompt.encode(errors="surrogateescape")
    prompt = tokenizer.prompt(text)
    context = len(prompt) + arguments.tokens
    cache, ends = ContiguousCache.Config(), tokenizer.end_ids
    try:
        generator = Generator(model, context=context, temperature=arguments.temperature, cache=cache, end_ids=ends)
        found = generator(prompt, num_tokens=arguments.tokens, key=jax.random.key(arguments.seed))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise AxcoreError(
            f"no memory for a cache of {context} tokens; ask for fewer than --tokens {arguments.tokens}"
        ) from error
    sys.stdout.write((text + tokenizer.decode(found)).decode(errors="replace") + "\n")
    return 0


def _model(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """(the model with its weights, its tokenizer)."""
    from axcore.module import DTypes, abstract
    from axcore.train.checkpoint.initial import FromRun, gathered
    from axcore.train.checkpoint.model_folder import ModelFolder, flat, like

    name = arguments.model
    if os.sep in name or (name and pathlib.Path(name).is_dir()):
        if arguments.edits:
            raise AxcoreError("--use, --target and --set edit a recipe; a folder's model is as it is")
        found = ModelFolder.open(name)
        cfg, tokenizer, initial = found.model, found.tokenizer, FromRun.Config(folder=name)
    else:
        try:
            trainer = compose(name, arguments.edits)
        except PluginError as error:
            raise PluginError(f"there is no folder {name!r}, and as a recipe: {error}") from error
        cfg, tokenizer = trainer.model, trainer.input.tokenizer
        initial = trainer.initial
        if initial is None:
            raise AxcoreError(
                f"the recipe {name!r} brings no weights: give the folder of a run of it (axcore train {name}), or set "
                f"initial"
            )
    if tokenizer is None or not hasattr(tokenizer, "build"):
        remedy = "convert it again with --tokenizer FILE" if pathlib.Path(name).is_dir() else "set input.tokenizer"
        raise ConfigError(f"{name}: nobody says which tokenizer the model's text has; {remedy}")
    with under("tokenizer"):
        built = tokenizer.build()
    known = getattr(cfg, "vocab_size", built.vocab_size)
    if built.vocab_size > known:
        raise ConfigError(f"{name}: the tokenizer has {built.vocab_size} ids, and model.vocab_size={known}")
    if arguments.dtype is not None:
        asked = DTypes(param=arguments.dtype, compute=arguments.dtype)
        cfg = cfg.set(dtypes=asked.over(cfg.dtypes or DTypes()))
    fn, params, state = abstract(cfg, "model")
    loaded = gathered(initial, cfg, flat(params), flat(state), 0)
    return fn.bind(like(params, loaded), like(state, loaded)), built
