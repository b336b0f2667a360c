"""`axcore aot RECIPE|FOLDER`."""

from __future__ import annotations

import argparse

from axcore.cli.compose import Commands, add_edits, compose, split_cpu
from axcore.config import AxcoreError, has_field


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "aot",
        help="compile the training step of a recipe and report its cost",
        description="Compiles the training step for the devices of this machine and reports memory and FLOPs.",
    )
    parser.add_argument("recipe", help="a recipe that `axcore recipes` lists, or a run folder")
    add_edits(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from axcore.aot import compile_step  # imports jax, so only when needed

    cfg = compose(arguments.recipe, arguments.edits)
    if not has_field(cfg, "learner"):
        raise AxcoreError(f"{arguments.recipe} is a model without training. Give a recipe or a run folder")
    split_cpu(arguments.edits)
    print(compile_step(cfg))
