"""`axcore show`, `axcore diff` and `axcore tree`: inspect recipes without running them."""

from __future__ import annotations

import argparse
from pathlib import Path

from axcore.cli.compose import Commands, add_edits, compose


def add(commands: Commands) -> None:
    show = commands.add_parser(
        "show", help="print the config of a recipe", description="Prints the config of a recipe as text."
    )
    show.add_argument("recipe", help="a recipe that `axcore recipes` lists")
    show.add_argument("--json", action="store_true", help="print JSON that axcore.from_json reads")
    show.add_argument("--history", metavar="PATH", help="print only the edits of the node or value at PATH")
    add_edits(show)
    show.set_defaults(run=run_show)

    diff = commands.add_parser("diff", help="compare two recipes", description="Prints the changes from A to B.")
    diff.add_argument("a", metavar="A", help="a recipe")
    diff.add_argument("b", metavar="B", help="the recipe to which --use, --target and --set apply")
    add_edits(diff)
    diff.set_defaults(run=run_diff)

    tree = commands.add_parser(
        "tree",
        help="print the module tree of a recipe",
        description="Prints the module tree with parameters, shapes, logical axes, bytes and suppliers.",
    )
    tree.add_argument("recipe", help="a recipe that `axcore recipes` lists")
    tree.add_argument(
        "--html", nargs="?", const="", metavar="FILE", help="write an interactive page (default: RECIPE.html)"
    )
    add_edits(tree)
    tree.set_defaults(run=run_tree)


def run_show(arguments: argparse.Namespace) -> None:
    from axcore.config import text, to_json

    cfg = compose(arguments.recipe, arguments.edits)
    if arguments.history is not None:
        print(cfg.history(arguments.history))
    else:
        print(to_json(cfg) if arguments.json else text(cfg), end="\n" if arguments.json else "")


def run_diff(arguments: argparse.Namespace) -> None:
    print(compose(arguments.b, arguments.edits).diff(compose(arguments.a, ())))


def run_tree(arguments: argparse.Namespace) -> None:
    from axcore.aot import tree, tree_page
    from axcore.train.files import write_text

    modules = tree(compose(arguments.recipe, arguments.edits))
    if arguments.html is None:
        print(modules)
        return
    page = Path(arguments.html or f"{arguments.recipe}.html").absolute()
    write_text(page, tree_page(modules, title=arguments.recipe))
    print(page)
