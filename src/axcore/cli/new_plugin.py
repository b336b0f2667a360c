"""`axcore new-plugin NAME --kind KIND`: writes a small, installable distribution with passing tests."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import tempfile
from pathlib import Path

from axcore.cli.compose import Commands
from axcore.config import AxcoreError
from axcore.plugin import registry

TEMPLATES = Path(__file__).parent.parent / "templates"
"""One folder for each kind. It contains the distribution `axcore-new-KIND` of the plugin `new-KIND`."""
KINDS = (
    "layer",
    "recurrent",
    "attention",
    "grouped_matmul",
    "kv_cache",
    "drafter",
    "grammar_compiler",
    "parallelism",
    "numerics",
    "recipe",
    "optimizer",
    "input",
    "callback",
    "evaluator",
    "command",
)
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
PREFIX = "axcore-"


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "new-plugin",
        help="write a new plugin",
        description="Writes a plugin into the folder NAME, as an installable distribution with tests.",
    )
    parser.add_argument("name", metavar="NAME", help="the name of the plugin in configs, as in my-gate")
    parser.add_argument("--kind", required=True, choices=KINDS, help="the kind of plugin")
    parser.add_argument("--out", default=".", metavar="DIR", help="the parent folder (default: the current folder)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    if not arguments.out:
        raise AxcoreError("--out='' is not a path. Give the path of a folder.")
    folder = new_plugin(arguments.name, arguments.kind, Path(arguments.out))
    shown = str(folder) if folder.is_absolute() else f"./{folder}"  # pip looks up a bare name in an index
    print(f"wrote {shown}; next:\n")
    print(f"  pip install -e '{shown}[test]'")
    print(f"  pytest {shlex.quote(shown)}")
    print(f"  axcore plugins {arguments.name.removeprefix(PREFIX)}")
    print("\nREADME.md explains what to replace")


def new_plugin(name: str, kind: str, out: Path) -> Path:
    """Writes the folder `out / name`, or nothing if an error occurs.

    Args:
        name: The id of the plugin, with or without the prefix `axcore-` of the distribution.
        kind: One of `KINDS`.
        out: The parent folder, which is created if necessary.

    Returns:
        The new folder.

    Raises:
        AxcoreError: The name is invalid or taken, or the folder exists or cannot be written.
    """
    id = name.removeprefix(PREFIX)
    if not NAME.fullmatch(id):
        raise AxcoreError(
            f"the name of a plugin must be lowercase words joined by hyphens, such as my-gate, not {name!r}"
        )
    names = {
        f"axcore-new-{kind.replace('_', '-')}": f"{PREFIX}{id}",
        f"axcore_new_{kind}": f"axcore_{id.replace('-', '_')}",
        f"new-{kind.replace('_', '-')}": id,
        f"new_{kind}": id.replace("-", "_"),
    }
    _check_available(id, names[f"axcore_new_{kind}"])
    folder = out / name
    if folder.exists():
        raise AxcoreError(f"{folder} already exists. Choose another name or --out, or remove it")
    placeholder = re.compile("|".join(names))  # longer names come first

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


def _check_available(id: str, package: str) -> None:
    for plugin in registry().plugins.values():
        if id == plugin.id or f"{PREFIX}{id}" == plugin.distribution:
            raise AxcoreError(f"the plugin {plugin.id!r} ({plugin}) is already installed. Choose another name")
        for offer in plugin.offers:
            if id == offer.name:
                raise AxcoreError(
                    f"{plugin.id!r} ({plugin}) already offers the {offer.kind} {id!r}. Choose another name"
                )
    if importlib.util.find_spec(package) is not None:
        raise AxcoreError(f"a package {package!r} is already installed. Choose another name")
