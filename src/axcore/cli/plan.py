"""`axcore plan RECIPE --target ACCELERATOR`."""

from __future__ import annotations

import argparse

from axcore.cli.compose import Commands, compose
from axcore.runtime import ExitCode


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="search the mesh, remat, unrolling and microbatches with which a recipe runs fastest on an accelerator",
        description="Estimates memory and time of every candidate with formulas, compiles the best, and prints a "
        "ranked table and the mesh rule of the best. The exit code is 3 if nothing fits.",
    )
    parser.add_argument("recipe", help="a recipe that `axcore recipes` lists")
    parser.add_argument("--target", required=True, metavar="ACCELERATOR", help="an accelerator such as gpu-h100-8")
    parser.add_argument("--global-batch", type=int, metavar="ROWS", help="rows of a batch (default: the recipe's)")
    parser.add_argument(
        "--compile", type=int, default=2, metavar="N", help="compile until N candidates fit (default: 2)"
    )
    parser.add_argument("--use", action="append", default=[], metavar="FEATURE[:KEY=VALUE,...]")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from axcore.aot.plan import plan  # imports jax, so only when needed

    edits = [*(("use", text) for text in arguments.use), ("target", arguments.target)]
    cfg = compose(arguments.recipe, [*edits, *(("set", text) for text in arguments.set)])
    if arguments.global_batch is not None:
        cfg = cfg.set(input=cfg.input.set(batch_size=arguments.global_batch))
    found = plan(cfg, arguments.target, arguments.compile)
    print(found)
    return ExitCode.DOES_NOT_FIT if found.best is None else ExitCode.DONE
