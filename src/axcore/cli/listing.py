"""`axcore plugins` and `axcore recipes`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from axcore.plugin import Recipe, registry


def add(commands: Any) -> None:
    plugins = commands.add_parser("plugins", help="list the installed plugins", description="Lists installed plugins.")
    plugins.set_defaults(run=list_plugins)
    recipes = commands.add_parser("recipes", help="list the recipes", description="Lists recipes that plugins bring.")
    recipes.set_defaults(run=list_recipes)


def list_plugins(_: argparse.Namespace) -> None:
    rows = []
    for plugin in registry().plugins.values():
        offers = ", ".join(f"{offer.kind} {offer.name}" for offer in plugin.offers)
        last_line = plugin.detail.strip().splitlines()[-1] if plugin.detail else ""
        rows.append((plugin.id, plugin.distribution, plugin.version, str(plugin.state), offers or last_line))
    _table(("id", "distribution", "version", "state", "offers"), rows, "no plugins are installed")


def list_recipes(_: argparse.Namespace) -> None:
    rows = [(offer.name, offer.summary, plugin.distribution) for plugin, offer in registry().offers(Recipe)]
    _table(("recipe", "summary", "from"), rows, "no installed plugin brings recipes; pip install axcore-recipes")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> None:
    rows = list(rows)
    if not rows:
        print(empty)
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
