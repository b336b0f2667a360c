"""`axcore golden check|update`: one text file per recipe, so that reviews show every change of a config."""

from __future__ import annotations

import argparse
from pathlib import Path

from axcore.cli.compose import Commands
from axcore.config import AxcoreError


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "golden",
        help="check or update the golden file of every recipe",
        description="Checks or writes one text file per recipe, so that reviews show every change of a config.",
    )
    parser.add_argument("action", choices=("check", "update"))
    parser.add_argument("--folder", default="golden", help="the folder of the golden files (default: golden)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from axcore.config import diff_flat, flatten, parse_text, text
    from axcore.plugin import Recipe, recipe, registry
    from axcore.train.files import expanded, write_text
    from axcore.train.run.folder import create

    folder = expanded(arguments.folder, "--folder")
    configs = {offer.name: recipe(offer.name) for _, offer in registry().offers(Recipe)}
    stale = {path.stem for path in folder.glob("*.txt")} - set(configs)
    if arguments.action == "update":
        create(folder)
        for name, cfg in configs.items():
            write_text(folder / f"{name}.txt", text(cfg))
        for name in sorted(stale):  # not deleted, because the plugin may be missing only on this machine
            print(f"{folder / name}.txt: no installed plugin offers this recipe. Delete the file if the recipe is gone")
        print(f"{len(configs)} golden files in {folder}")
        return
    wrong = [f"{name}: the recipe does not exist" for name in sorted(stale)]
    for name, cfg in configs.items():
        file = folder / f"{name}.txt"
        if not file.exists():
            wrong.append(f"{name}: the golden file does not exist")
        elif changes := diff_flat(parse_text(_read(file)), flatten(cfg)):
            wrong.append(f"{name}:\n{changes}")
    if wrong:
        listed = "\n".join(wrong)
        raise AxcoreError(f"recipes differ from {folder}. If this is intended, run axcore golden update\n{listed}")
    print(f"{len(configs)} recipes match {folder}")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise AxcoreError(f"cannot read {file}: {error}") from None
