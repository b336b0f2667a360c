"""`axcore explain RECIPE`."""

from __future__ import annotations

import argparse
from typing import Any

from axcore.cli.compose import add_edits, compose


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="say who supplied each node of a recipe, and why each slot holds what it holds",
        description="Prints the nodes of a recipe with their suppliers, and for each slot which candidates there are, "
        "which is chosen and why the others are not. With --target, for that hardware.",
    )
    parser.add_argument("recipe")
    parser.add_argument("--json", action="store_true")
    add_edits(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from axcore.aot import explain

    targets = [text for kind, text in arguments.edits if kind == "target"]
    cfg = compose(arguments.recipe, arguments.edits)
    found = explain(cfg, targets[-1] if targets else None)
    print(found.to_json() if arguments.json else found)
