"""`axcore generate MODEL --prompt TEXT`."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from axcore.cli.compose import Commands, add_edits, compose, is_folder
from axcore.config import AxcoreError, ConfigError, under
from axcore.plugin import KVCacheOffer, PluginError, offered, registry

if TYPE_CHECKING:
    from axcore.nn import KVCache
    from axcore.train.data.tokenizers import Tokenizer


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text from a prompt",
        description="Generates text from a prompt. The model is a run folder, a folder that `axcore convert` wrote, or "
        "a recipe with initial weights.",
    )
    parser.add_argument("model", help="a folder, or a recipe that `axcore recipes` lists")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--tokens", type=int, default=64, help="maximum number of new tokens (default: 64)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="sampling temperature; 0 selects the most likely token (default: 0)",
    )
    parser.add_argument("--seed", type=int, help="sampling seed; requires a temperature above 0 (default: 0)")
    parser.add_argument("--dtype", help="dtype of parameters and activations, such as bfloat16 (default: the model's)")
    parser.add_argument(
        "--cache",
        metavar="CACHE[:KEY=VALUE,...]",
        help="KV cache of every layer: one that `axcore plugins` lists, or none, which recomputes all tokens for each "
        "new token (default: the caches of the model, and contiguous in layers without one)",
    )
    add_edits(parser, target=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import jax

    from axcore.infer import Generator

    if not 1 <= arguments.tokens < 2**31:
        raise AxcoreError(f"--tokens must be from 1 to 2**31 - 1, not {arguments.tokens}")
    seed = arguments.seed or 0
    if not 0 <= seed < 2**32:
        raise AxcoreError(f"--seed must be from 0 to 2**32 - 1, not {seed}")
    if arguments.seed is not None and arguments.temperature == 0:
        raise AxcoreError(f"--seed {seed} has no effect at temperature 0. Set --temperature above 0, or omit --seed")
    model, tokenizer = _model(arguments)
    text = arguments.prompt.encode(errors="surrogateescape")
    prompt = tokenizer.prompt(text)
    context = len(prompt) + arguments.tokens
    cache, ends = _cache(arguments.cache), tokenizer.end_ids
    try:
        generator = Generator(model, context=context, temperature=arguments.temperature, cache=cache, end_ids=ends)
        found = generator(prompt, num_tokens=arguments.tokens, key=jax.random.key(seed))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise AxcoreError(
            f"a cache of {context} tokens does not fit in memory. Reduce --tokens {arguments.tokens}"
        ) from error
    sys.stdout.write((text + tokenizer.decode(found)).decode(errors="replace") + "\n")
    return 0


def _not_editable(folder: str, edits: Sequence[tuple[str, str]]) -> str:
    """Why the model in a folder takes no edits, and how to choose a KV cache."""
    given = ", ".join(f"--{kind} {text}" for kind, text in edits)
    message = f"{folder}: {given} would edit a recipe, but the model in a folder is used as it is."
    names = {offer.name for _, offer in registry().offers(KVCacheOffer)}
    caches = [text for kind, text in edits if kind == "use" and text.partition(":")[0] in names]
    return f"{message} To choose a KV cache: --cache {caches[0]}" if caches else f"{message} Omit it."


def _cache(text: str | None) -> KVCache.Config | None:
    """The config of the cache for `--cache`, which fills empty slots; None: no cache."""
    from axcore.nn import ContiguousCache

    if text == "none":
        return None
    return ContiguousCache.Config() if text is None else cast("KVCache.Config", offered(KVCacheOffer, text))


def _model(arguments: argparse.Namespace) -> tuple[Any, Tokenizer]:  # Any: the class of the model
    """The model with its weights, and its tokenizer."""
    from axcore.module import DTypes, abstract
    from axcore.nn import without_caches
    from axcore.train.checkpoint.initial import FromRun, initial_arrays
    from axcore.train.checkpoint.model_folder import ModelFolder, flat, like

    name = arguments.model
    if is_folder(name):
        if arguments.edits:
            raise AxcoreError(_not_editable(name, arguments.edits))
        found = ModelFolder.open(name)
        cfg, tokenizer, initial = found.model, found.tokenizer, FromRun.Config(folder=name)
    else:
        try:
            trainer = compose(name, arguments.edits)
        except PluginError as error:
            raise PluginError(f"{name!r} is not a model folder and cannot be composed as a recipe: {error}") from error
        cfg, tokenizer = trainer.model, trainer.input.tokenizer
        initial = trainer.initial
        if initial is None:
            raise AxcoreError(
                f"the recipe {name!r} has no weights. Pass the folder of a trained run (axcore train {name}), or set "
                f"initial"
            )
    if tokenizer is None or not hasattr(tokenizer, "build"):
        remedy = "Convert it again with --tokenizer FILE" if pathlib.Path(name).is_dir() else "Set input.tokenizer"
        raise ConfigError(f"{name}: the model has no tokenizer. {remedy}")
    with under("tokenizer"):
        built = tokenizer.build()
    known = getattr(cfg, "vocab_size", built.vocab_size)
    if built.vocab_size > known:
        raise ConfigError(f"{name}: the tokenizer has {built.vocab_size} ids, but model.vocab_size={known}")
    if arguments.dtype is not None:
        asked = DTypes(param=arguments.dtype, compute=arguments.dtype)
        cfg = cfg.set(dtypes=asked.over(cfg.dtypes or DTypes()))
    if arguments.cache is not None:
        cfg = without_caches(cfg)
    fn, params, state = abstract(cfg, "model")
    loaded = initial_arrays(initial, cfg, flat(params), flat(state), 0)
    return fn.bind(like(params, loaded), like(state, loaded)), built
