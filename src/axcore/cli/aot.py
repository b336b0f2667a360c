"""`axcore aot RECIPE`."""

from __future__ import annotations

import argparse
from typing import Any

from axcore.cli.compose import add_edits, compose


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "aot",
        help="compile a recipe's training step and report what it needs",
        description="Compiles the training step for the devices of this machine and reports memory and FLOPs.",
    )
    parser.add_argument("recipe", help="as `axcore recipes` lists it")
    add_edits(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from axcore.aot import compile_step  # brings jax along: not before it is needed

    print(compile_step(compose(arguments.recipe, arguments.edits)))
