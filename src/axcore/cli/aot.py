"""`axcore aot RECIPE|FOLDER`."""

from __future__ import annotations

import argparse
import pathlib

from axcore.cli.compose import Commands, add_edits, compose
from axcore.config import AxcoreError, has_field
from axcore.runtime import ExitCode


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "aot",
        help="compile a program of a recipe for any accelerator and report memory, work and communication",
        description="Compiles the training step (or a decoding step) of a recipe for an accelerator that this machine "
        "need not have, and reports its memory, the limit of the device, its FLOPs, bytes and collectives, and an "
        "estimate of its time. Without --target it compiles for the devices of this machine. The exit code is 3 if the "
        "program does not fit.",
    )
    parser.add_argument("recipe", help="a recipe that `axcore recipes` lists, or a run folder")
    parser.add_argument(
        "--program", choices=("train", "prefill", "decode"), default="train", help="what to compile (default: train)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - for stdout instead of the text")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page")
    parser.add_argument("--executable", metavar="FILE", help="write the compiled program")
    add_edits(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from axcore.aot import compile_program, report_page  # imports jax, so only when needed

    targets = [text for kind, text in arguments.edits if kind == "target"]
    cfg = compose(arguments.recipe, arguments.edits)
    if not has_field(cfg, "learner"):
        raise AxcoreError(f"{arguments.recipe} is a model without training. Give a recipe or a run folder")
    target = targets[-1] if targets else None
    report = compile_program(cfg, target, arguments.program, executable=arguments.executable)
    print(report.to_json() if arguments.json == "-" else report)
    if arguments.json not in (None, "-"):
        pathlib.Path(arguments.json).write_text(report.to_json())
    if arguments.html is not None:
        page = report_page(report, title=f"{arguments.recipe}, {report.program} on {report.target}")
        pathlib.Path(arguments.html).write_text(page)
    return ExitCode.DONE if report.fits else ExitCode.DOES_NOT_FIT
