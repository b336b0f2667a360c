"""`axcore golden check|update`: the text form of every recipe, kept under review."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from axcore.config import AxcoreError


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "golden",
        help="compare every recipe with its golden file",
        description="Keeps one text file for each recipe, so that a change of any config shows up in review.",
    )
    parser.add_argument("action", choices=("check", "update"))
    parser.add_argument("--folder", default="golden", help="where the files are (default: golden)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from axcore.config import diff_flat, flatten, parse_text, text
    from axcore.plugin import Recipe, recipe, registry
    from axcore.train.files import write_text
    from axcore.train.run.folder import create

    folder = Path(arguments.folder)
    configs = {offer.name: recipe(offer.name) for _, offer in registry().offers(Recipe)}
    stale = {path.stem for path in folder.glob("*.txt")} - set(configs)
    if arguments.action == "update":
        create(folder)
        for name, cfg in configs.items():
            write_text(folder / f"{name}.txt", text(cfg))
        for name in sorted(stale):  # not deleted: its plugin may only be missing here
            print(f"{folder / name}.txt: no installed plugin brings this recipe; delete it if it is gone")
        print(f"{len(configs)} golden files in {folder}")
        return
    wrong = [f"{name}: no recipe of that name any more" for name in sorted(stale)]
    for name, cfg in configs.items():
        file = folder / f"{name}.txt"
        if not file.exists():
            wrong.append(f"{name}: it has no golden file")
        elif changes := diff_flat(parse_text(_read(file)), flatten(cfg)):
            wrong.append(f"{name}:\n{changes}")
    if wrong:
        listed = "\n".join(wrong)
        raise AxcoreError(f"recipes differ from {folder}; if that is meant, run axcore golden update\n{listed}")
    print(f"{len(configs)} recipes are as {folder} says")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise AxcoreError(f"cannot read {file}: {error}") from None
