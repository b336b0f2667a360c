"""`axcore train RECIPE`."""

from __future__ import annotations

import argparse

from axcore import runtime
from axcore.cli.compose import Commands, add_edits, compose, is_folder, split_cpu
from axcore.config import AxcoreError


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "train", help="train a recipe", description="Trains a recipe. Writes checkpoints and metrics to the run folder."
    )
    parser.add_argument("recipe", help="a recipe that `axcore recipes` lists")
    parser.add_argument(
        "--out",
        help="the run folder (default: runs/RECIPE); an earlier run there is moved aside unless --resume is given",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="wall-clock training time, including compilation; replaces the recipe's length",
    )
    parser.add_argument("--steps", type=int, help="number of training steps; replaces the recipe's length")
    parser.add_argument("--seed", type=int, help="seed of parameters, dropout and shuffling")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in the run folder")
    add_edits(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    runtime.start()
    with runtime.watch():
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    if is_folder(arguments.recipe):
        raise AxcoreError(
            f"train requires a recipe, and {arguments.recipe} is a folder. To continue a run, repeat its command with "
            f"--resume. To start from the weights of a folder, use --use run-weights:folder={arguments.recipe}"
        )
    cfg = compose(arguments.recipe, arguments.edits)
    split_cpu(arguments.edits)
    if arguments.minutes is not None:
        cfg = cfg.set(minutes=arguments.minutes, steps=arguments.steps)
    elif arguments.steps is not None:
        cfg = cfg.set(steps=arguments.steps, minutes=None)
    if arguments.seed is not None:
        cfg = cfg.set(seed=arguments.seed)
    folder = f"runs/{arguments.recipe}" if arguments.out is None else arguments.out
    summary = cfg.build().run(folder, resume=arguments.resume)
    if runtime.index() != 0:
        return 0
    for name, value in summary.items():
        if value is None:  # not measured, such as the speed of a resumed run that has no steps left
            continue
        print(f"{name:24} {value:.4g}" if isinstance(value, float) else f"{name:24} {value}")
    print(f"{'folder':24} {folder}")
    return 0
