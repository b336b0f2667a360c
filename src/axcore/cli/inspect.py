"""`axcore show`, `axcore diff` and `axcore tree`: inspect recipes without running them."""

from __future__ import annotations

import argparse

from axcore.cli.compose import Commands, add_edits, compose, is_folder
from axcore.config import AxcoreError, Config


def add(commands: Commands) -> None:
    show = commands.add_parser(
        "show",
        help="print the config of a recipe or run",
        description="Prints the config of a recipe, or the config that a folder was written with, as text.",
    )
    show.add_argument("recipe", help="a recipe that `axcore recipes` lists, a run folder or a model folder")
    form = show.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON that axcore.from_json reads")
    form.add_argument("--history", metavar="PATH", help="print only the edits of the node or value at PATH")
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
        "--html", nargs="?", const=True, metavar="FILE", help="write an interactive page (default: RECIPE.html)"
    )
    add_edits(tree, target=False)
    tree.set_defaults(run=run_tree)


def run_show(arguments: argparse.Namespace) -> None:
    from axcore.config import text, to_json

    cfg = _stored(arguments) if is_folder(arguments.recipe) else compose(arguments.recipe, arguments.edits)
    if arguments.history is not None:
        print(cfg.history(arguments.history))
    else:
        print(to_json(cfg) if arguments.json else text(cfg), end="\n" if arguments.json else "")


def _stored(arguments: argparse.Namespace) -> Config:
    """The config in a run folder or model folder."""
    from axcore.train.checkpoint.model_folder import ModelFolder

    if arguments.edits or arguments.history is not None:
        raise AxcoreError(
            f"{arguments.recipe}: --use, --target, --set and --history require a recipe, but this is a folder"
        )
    cfg: Config = ModelFolder.open(arguments.recipe).cfg
    return cfg


def run_diff(arguments: argparse.Namespace) -> None:
    print(compose(arguments.b, arguments.edits).diff(compose(arguments.a, ())))


def run_tree(arguments: argparse.Namespace) -> None:
    from axcore.aot import tree, tree_page
    from axcore.train.files import expanded, write_text

    modules = tree(compose(arguments.recipe, arguments.edits))
    if arguments.html is None:
        print(modules)
        return
    page = expanded(f"{arguments.recipe}.html" if arguments.html is True else arguments.html, "--html").absolute()
    write_text(page, tree_page(modules, title=arguments.recipe))
    print(page)
