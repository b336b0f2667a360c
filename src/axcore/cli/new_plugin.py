"""`axcore new-plugin NAME --kind KIND`: a distribution that installs, passes its tests and does something small."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

from axcore.config import AxcoreError
from axcore.plugin import registry

TEMPLATES = Path(__file__).parent.parent / "templates"
"""A folder for each kind. Each is a distribution itself, called `axcore-new-KIND`, of the plugin `new-KIND`."""
KINDS = ("layer", "attention", "kv_cache", "parallelism", "numerics", "recipe")
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
PREFIX = "axcore-"


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "new-plugin",
        help="write a new plugin",
        description="Writes a plugin of a kind into the folder NAME: a distribution with tests, ready to be installed.",
    )
    parser.add_argument("name", metavar="NAME", help="what configs will call it, as in my-gate")
    parser.add_argument("--kind", required=True, choices=KINDS, help="what it offers")
    parser.add_argument("--out", default=".", metavar="DIR", help="where to put the folder (default: here)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    folder = new_plugin(arguments.name, arguments.kind, Path(arguments.out))
    shown = str(folder) if folder.is_absolute() else f"./{folder}"  # pip takes a bare name for one of an index
    print(f"wrote {shown}; next:\n")
    print(f"  pip install -e '{shown}[test]'")
    print(f"  pytest {shlex.quote(shown)}")
    print(f"  axcore plugins {arguments.name.removeprefix(PREFIX)}")
    print("\nits README.md says what to replace")


def new_plugin(name: str, kind: str, out: Path) -> Path:
    """Writes the folder `out / name`, whole or not at all.

    Args:
        name: the id of the plugin, with or without `axcore-` before it; the distribution has it, the id does not.
        kind: one of `KINDS`.
        out: made if need be.

    Returns:
        The new folder.

    Raises:
        AxcoreError: the name is not of that form or taken, the folder is there already, or it cannot be written.
    """
    id = name.removeprefix(PREFIX)
    if not NAME.fullmatch(id):
        raise AxcoreError(f"a plugin's name is lower-case words joined by hyphens, as in my-gate, not {name!r}")
    names = {
        f"axcore-new-{kind.replace('_', '-')}": f"{PREFIX}{id}",
        f"axcore_new_{kind}": f"axcore_{id.replace('-', '_')}",
        f"new-{kind.replace('_', '-')}": id,
        f"new_{kind}": id.replace("-", "_"),
    }
    _refuse_taken(id, names[f"axcore_new_{kind}"])
    folder = out / name
    if folder.exists():
        raise AxcoreError(f"{folder} exists already; choose another name or --out, or remove it")
    placeholder = re.compile("|".join(names))  # the longer ones first

    def rename(text: str) -> str:
        return placeholder.sub(lambda found: names[found[0]], text)

    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".new-plugin-") as scratch:
            draft = Path(scratch) / name
            for source in sorted((TEMPLATES / kind).rglob("*")):
                if source.is_file() and "__pycache__" not in source.parts:
                    target = draft / rename(str(source.relative_to(TEMPLATES / kind)))
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(rename(source.read_text(encoding="utf-8")), encoding="utf-8")
            draft.rename(folder)
    except OSError as error:
        raise AxcoreError(f"cannot write {folder}: {error}") from None
    return folder


def _refuse_taken(id: str, package: str) -> None:
    for plugin in registry().plugins.values():
        if id == plugin.id or f"{PREFIX}{id}" == plugin.distribution:
            raise AxcoreError(f"the plugin {plugin.id!r} ({plugin}) is installed already; choose another name")
        for offer in plugin.offers:
            if id == offer.name:
                raise AxcoreError(
                    f"{plugin.id!r} ({plugin}) offers the {offer.kind} {id!r} already; choose another name"
                )
    if importlib.util.find_spec(package) is not None:
        raise AxcoreError(f"a package {package!r} can be imported already; choose another name")
