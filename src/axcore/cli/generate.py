"""`axcore generate MODEL --prompt TEXT`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from axcore.cli.compose import Commands, add_edits, compose, is_folder
from axcore.config import AxcoreError
from axcore.plugin import KVCacheOffer, PluginError, offered, registry

if TYPE_CHECKING:
    from axcore.infer.loading import Loaded
    from axcore.nn import KVCache


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
    model, tokenizer = _loaded(arguments)
    text = arguments.prompt.encode(errors="surrogateescape")
    prompt = tokenizer.prompt(text)
    context = len(prompt) + arguments.tokens
    cache, ends = _cache(arguments.cache), tokenizer.end_ids
    try:
        generator = Generator(model, context=context, temperature=arguments.temperature, cache=cache, end_ids=ends)
        found = generator(prompt, num_tokens=arguments.tokens, key=jax.random.key(seed))
    except (AxcoreError, jax.errors.JaxRuntimeError) as error:
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


def _loaded(arguments: argparse.Namespace) -> Loaded:
    """The model with its weights, and its tokenizer."""
    from axcore.infer.loading import load

    name, dtype, keep_caches = arguments.model, arguments.dtype, arguments.cache is None
    if is_folder(name):
        if arguments.edits:
            raise AxcoreError(_not_editable(name, arguments.edits))
        return load(name, dtype=dtype, keep_caches=keep_caches)
    try:
        trainer = compose(name, arguments.edits)
    except PluginError as error:
        raise PluginError(f"{name!r} is not a model folder and cannot be composed as a recipe: {error}") from error
    return load(trainer, name=name, dtype=dtype, keep_caches=keep_caches)
