"""`axcore explain RECIPE|FOLDER`."""

from __future__ import annotations

import argparse

from axcore.cli.compose import RECIPE_OR_FOLDER, Commands, add_edits, compose
from axcore.cli.model import add_engine, chosen_engine
from axcore.config import ConfigError


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "explain",
        help="show the supplier of each node of a config and the candidates for each slot",
        description="Prints the nodes of a config with their suppliers, and the candidates for each slot, with the "
        "reason why a candidate is not chosen. --target explains the config for other hardware. The exit code is 2 if "
        "no kernel of an attention supports its calls.",
    )
    parser.add_argument("recipe", help=RECIPE_OR_FOLDER)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_edits(parser)
    add_engine(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from axcore.aot import explain

    targets = [text for kind, text in arguments.edits if kind == "target"]
    cfg = compose(arguments.recipe, arguments.edits)
    found = explain(cfg, targets[-1] if targets else None, chosen_engine(arguments))
    print(found.to_json() if arguments.json else found)
    if found.problems:
        raise ConfigError("\n".join(found.problems))
