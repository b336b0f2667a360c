"""`axcore show`, `axcore diff` and `axcore tree`: inspect configs without running them."""

from __future__ import annotations

import argparse
import pathlib

from axcore.cli.compose import RECIPE_OR_FOLDER, Commands, add_edits, compose


def add(commands: Commands) -> None:
    show = commands.add_parser(
        "show",
        help="print the config of a recipe or folder",
        description="Prints the config of a recipe, a run folder or a model folder, as text.",
    )
    show.add_argument("recipe", help=RECIPE_OR_FOLDER)
    form = show.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON that axcore.from_json reads")
    form.add_argument("--history", metavar="PATH", help="print only the edits of the node or value at PATH")
    add_edits(show)
    show.set_defaults(run=run_show)

    diff = commands.add_parser("diff", help="compare two configs", description="Prints the changes from A to B.")
    diff.add_argument("a", metavar="A", help=RECIPE_OR_FOLDER)
    diff.add_argument("b", metavar="B", help="another, to which --use, --target and --set apply")
    add_edits(diff)
    diff.set_defaults(run=run_diff)

    tree = commands.add_parser(
        "tree",
        help="print the module tree of a recipe or folder",
        description="Prints the module tree with parameters, shapes, logical axes, bytes and suppliers.",
    )
    tree.add_argument("recipe", help=RECIPE_OR_FOLDER)
    tree.add_argument(
        "--html", nargs="?", const=True, metavar="FILE", help="write an interactive page (default: NAME.html)"
    )
    add_edits(tree, target=False)
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
    from axcore.train.files import expanded, write_text

    modules = tree(compose(arguments.recipe, arguments.edits))
    if arguments.html is None:
        print(modules)
        return
    name = pathlib.Path(arguments.recipe).name
    page = expanded(f"{name}.html" if arguments.html is True else arguments.html, "--html").absolute()
    write_text(page, tree_page(modules, title=arguments.recipe))
    print(page)
