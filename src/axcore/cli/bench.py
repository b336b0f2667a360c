"""`axcore bench serve MODEL`."""

from __future__ import annotations

import argparse
import json

from axcore.cli.compose import Commands
from axcore.cli.model import (
    add_model,
    add_speculation,
    add_step_sizes,
    chosen_cache,
    chosen_drafter,
    chosen_layout,
    chosen_step_tokens,
    loaded_model,
)


def add(commands: Commands) -> None:
    parser = commands.add_parser("bench", help="measure an engine", description="Measures an engine under load.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    serve = kinds.add_parser(
        "serve",
        help="throughput and latency of many requests",
        description="Serves random prompts with greedy sampling, a constant number at a time, in this process. Prints "
        "a line of JSON.",
    )
    add_model(serve)
    add_speculation(serve)
    numbers = {
        "requests": (64, "requests in total"),
        "concurrency": (8, "requests at any time"),
        "input": (128, "tokens of a prompt"),
        "output": (64, "tokens of an output"),
    }
    for name, (default, text) in numbers.items():
        serve.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    add_step_sizes(serve)
    serve.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import time

    import jax

    from axcore.infer import Engine
    from axcore.infer.load_test import Load, measure

    load = Load(arguments.requests, arguments.concurrency, arguments.input, arguments.output)
    started = time.perf_counter()
    layout = chosen_layout(arguments)
    model, tokenizer = loaded_model(arguments, weights=False, layout=layout)
    cfg = Engine.Config(
        cache=chosen_cache(arguments),
        max_rows=load.concurrency,
        max_len=load.prompt_tokens + load.output_tokens,
        step_tokens=chosen_step_tokens(arguments),
        burst_tokens=arguments.burst_tokens,
        speculation=chosen_drafter(arguments),
    )
    with cfg.build(model, tokenizer, eos_ids=tokenizer.eos_ids, layout=layout) as engine:
        engine.warm_up(("greedy",))
        ready = time.perf_counter() - started
        compiled = engine.stats.compiled
        figures = measure(engine, load)
        stats = engine.stats
    card = jax.devices()[0].device_kind
    print(
        json.dumps(
            {
                "start_s": ready,
                **figures._asdict(),
                "draft_tokens": stats.draft_tokens,
                "accepted_tokens": stats.accepted_tokens,
                "compiled_late": stats.compiled - compiled,
                "device": card,
                "jax": jax.__version__,
            }
        )
    )
    return 0
