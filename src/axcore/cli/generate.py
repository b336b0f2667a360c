"""`axcore generate MODEL --prompt TEXT`."""

from __future__ import annotations

import argparse
import sys

from axcore.cli.compose import Commands
from axcore.cli.model import (
    add_adapters,
    add_guide,
    add_model,
    add_speculation,
    chosen_adapters,
    chosen_cache,
    chosen_drafter,
    chosen_grammar,
    chosen_grammars,
    chosen_layout,
    loaded_model,
)
from axcore.config import AxcoreError, allocating


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text from a prompt",
        description="Generates text from a prompt. The model is a run folder, a folder that `axcore convert` wrote, or "
        "a recipe with initial weights.",
    )
    add_model(parser, without=", or none, which recomputes all tokens for each new token")
    add_speculation(parser)
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--tokens", type=int, default=64, help="maximum number of new tokens (default: 64)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="sampling temperature; 0 selects the most likely token (default: 0)",
    )
    parser.add_argument("--seed", type=int, help="sampling seed; requires a temperature above 0 (default: 0)")
    add_adapters(parser, "generates with the adapter in FOLDER; NAME can be any name")
    add_guide(parser)
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
    if arguments.mesh is not None and arguments.cache == "none":
        raise AxcoreError("--mesh shards KV caches, but --cache is none. Choose a cache, or omit --mesh")
    grammar = chosen_grammar(arguments)
    grammars = None if grammar is None else chosen_grammars(arguments)
    if grammar is not None and arguments.cache == "none":
        raise AxcoreError("an output can match a grammar only with a KV cache, but --cache is none. Choose a cache")
    folders, room = chosen_adapters(arguments)
    if len(folders) > 1:
        raise AxcoreError(f"--adapter: an output has one adapter, not {', '.join(folders)}. Give one of them")
    if room is not None and not folders:
        raise AxcoreError(f"--adapters {arguments.adapters} has no effect without --adapter. Add one, or omit it")
    if room is not None and arguments.cache == "none":
        raise AxcoreError("--adapter requires a KV cache, but --cache is none. Choose a cache, or omit --adapter")
    layout = chosen_layout(arguments)
    model, tokenizer = loaded_model(arguments, layout=layout)
    text = arguments.prompt.encode(errors="surrogateescape")
    prompt = tokenizer.prompt(text)
    context = len(prompt) + arguments.tokens
    cache = None if arguments.cache == "none" else chosen_cache(arguments)
    ends = tokenizer.eos_ids
    with allocating(f"a cache of {context} tokens", f"Reduce --tokens {arguments.tokens}"):
        generator = Generator(
            model,
            context=context,
            temperature=arguments.temperature,
            cache=cache,
            eos_ids=ends,
            speculation=chosen_drafter(arguments),
            layout=layout,
            grammars=grammars,
            tokenizer=tokenizer,
            adapters=room,
        )
        for name, folder in folders.items():
            generator.load_adapter(name, folder)
        key, adapter = jax.random.key(seed), next(iter(folders), None)
        found = generator(prompt, num_tokens=arguments.tokens, key=key, grammar=grammar, adapter=adapter)
    sys.stdout.write((text + tokenizer.decode(found)).decode(errors="replace") + "\n")
    return 0
