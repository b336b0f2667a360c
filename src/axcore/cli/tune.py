"""`axcore tune RECIPE --out FILE`."""

from __future__ import annotations

import argparse

from axcore.cli.compose import RECIPE_OR_FOLDER, Commands, add_edits, compose
from axcore.cli.model import add_engine, chosen_engine


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "tune",
        help="measure the block sizes of a recipe's attention kernels on this machine's device",
        description="Times every kernel of the config with every candidate of its block sizes, forward and backward, "
        "for each distinct attention call. Prints a table and writes the fastest settings to a file. Apply it with "
        "--use tuned:file=FILE; with tuned:file=FILE,order=true also the order of the kernels changes.",
    )
    parser.add_argument("recipe", help=RECIPE_OR_FOLDER)
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write")
    add_edits(parser)
    add_engine(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from axcore.aot.tune import tune  # imports jax, so only when needed

    targets = [text for kind, text in arguments.edits if kind == "target"]
    cfg = compose(arguments.recipe, arguments.edits)
    found = tune(cfg, targets[-1] if targets else None, engine=chosen_engine(arguments))
    print(found)
    file = found.file()
    file.write(arguments.out)
    use = f"--use tuned:file={arguments.out}"
    if file.kernels:
        advice = f"apply it with {use}"
    elif len(file.order) > 1:
        advice = f"no kernel has block sizes to tune; apply the order with {use},order=true"
    else:
        advice = "it has nothing to apply, since there is one kernel and it has no block sizes to tune"
    print(f"\nwrote {arguments.out}; {advice}")
