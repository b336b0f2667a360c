"""`axcore plugins` and `axcore recipes`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from axcore.cli.compose import Commands
from axcore.config import AxcoreError, did_you_mean
from axcore.plugin import API_VERSION, MeshRule, Offer, Plugin, PluginError, Recipe, registry
from axcore.plugin.allowlist import record_hash, why_unverified
from axcore.plugin.features import ATTACHABLE, options_of

SCHEMA = 1
"""The version of the JSON form of `axcore plugins`. New fields do not change the version."""


def add(commands: Commands) -> None:
    plugins = commands.add_parser(
        "plugins",
        help="list the installed plugins",
        description="Lists the installed plugins, or shows one with its offers, options and traceback.",
    )
    plugins.add_argument("name", nargs="?", metavar="NAME", help="the id or distribution of a plugin")
    form = plugins.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument(
        "--write-allowlist", metavar="FILE", help="write an allowlist of the installed plugins, for AXCORE_ALLOWLIST"
    )
    plugins.set_defaults(run=list_plugins)
    recipes = commands.add_parser("recipes", help="list the recipes", description="Lists the recipes of all plugins.")
    recipes.set_defaults(run=list_recipes)


def list_plugins(arguments: argparse.Namespace) -> None:
    plugins = [*registry().plugins.values()]
    if arguments.name is not None:
        plugins = [_named(arguments.name, plugins)]
    if arguments.write_allowlist is not None:
        for name, reason in write_allowlist(plugins, Path(arguments.write_allowlist)).items():
            print(f"axcore: left out {name}: {reason}", file=sys.stderr)
        print(arguments.write_allowlist)
    elif arguments.json:
        found = {
            "schema": SCHEMA,
            "api": API_VERSION,
            "plugins": [_as_json(plugin) for plugin in plugins],
            "conflicts": registry().conflicts(),
        }
        print(json.dumps(found, indent=2))
    elif arguments.name is not None:
        _describe(plugins[0])
    else:
        rows = []
        for plugin in plugins:
            offers = ", ".join(f"{offer.kind} {_title(offer)}" for offer in plugin.offers)
            rows.append((plugin.id, plugin.distribution, plugin.version, str(plugin.state), offers or plugin.reason))
        table(("id", "distribution", "version", "state", "offers"), rows, "no plugins are installed")


def list_recipes(_: argparse.Namespace) -> None:
    rows = [(offer.name, offer.summary, plugin.distribution) for plugin, offer in registry().offers(Recipe)]
    none = "" if rows else f"no loaded plugin offers recipes; {registry().advice('recipes')}"
    table(("recipe", "summary", "from"), rows, none)


def _named(name: str, plugins: list[Plugin]) -> Plugin:
    for plugin in plugins:
        if name in (plugin.id, plugin.distribution):
            return plugin
    for plugin in plugins:
        if any(offer.name == name for offer in plugin.offers):
            raise AxcoreError(f"{name!r} is an offer of the plugin {plugin.id!r}. See: axcore plugins {plugin.id}")
    known = [each for plugin in plugins for each in (plugin.id, plugin.distribution)]
    raise AxcoreError(f"no plugin {name!r} is installed.{did_you_mean(name, known)} See: axcore plugins")


def _as_json(plugin: Plugin) -> dict[str, object]:
    return {
        "id": plugin.id,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "homepage": _homepage(plugin),
        "module": plugin.module,
        "api": plugin.api,
        "state": str(plugin.state),
        "reason": plugin.reason,
        "detail": plugin.detail,
        "offers": [{"kind": offer.kind} | vars(offer) for offer in plugin.offers],
    }


def _describe(plugin: Plugin) -> None:
    rows = [
        ("distribution", str(plugin)),
        ("homepage", _homepage(plugin)),
        ("module", plugin.module),
        ("plugin API", plugin.api),
        ("state", f"{plugin.state}: {plugin.reason}" if plugin.reason else str(plugin.state)),
        *(row for offer in plugin.offers for row in _describe_offer(plugin, offer)),
    ]
    table(("plugin", plugin.id), [(name, str(value)) for name, value in rows if value is not None], "")
    if plugin.detail.strip() != plugin.reason:
        print(f"\n{plugin.detail.rstrip()}")


def _title(offer: Offer) -> str:
    """The name of an offer; for a mesh rule, with its pattern."""
    return f"{offer.name} for {offer.pattern}" if isinstance(offer, MeshRule) else offer.name


def _describe_offer(plugin: Plugin, offer: Offer) -> Iterator[tuple[str, str]]:
    yield offer.kind, f"{_title(offer)}: {offer.summary} ({offer.target})"
    if not isinstance(offer, ATTACHABLE):
        return
    try:
        options = options_of(plugin, offer)
    except PluginError as error:  # for example, a package that the plugin imports is not installed
        yield "", f"  the options are unknown: {error}"
        return
    if options:
        yield "", "  " + ", ".join(f"{name}={value}" if value else name for name, value in options.items())


def write_allowlist(plugins: Iterable[Plugin], file: Path) -> dict[str, str]:
    """Writes an allowlist of the distributions that are installed now.

    Returns:
        The name of each distribution that cannot be listed, with the reason.

    Raises:
        PluginError: the file cannot be written.
    """
    tables: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for plugin in plugins:
        if plugin.id == "core":
            continue
        if reason := why_unverified(plugin):
            left_out[plugin.distribution] = reason
        elif plugin.point.dist is not None:
            values = {"name": plugin.distribution, "version": plugin.version, "record": record_hash(plugin.point.dist)}
            lines = [f"{name} = {json.dumps(value)}\n" for name, value in values.items()]
            tables[plugin.distribution] = "".join(["\n[[distribution]]\n", *lines])
    listed = [table for name, table in sorted(tables.items()) if name not in left_out]
    try:
        file.write_text("".join(["# Distributions whose axcore plugins may be imported.\n", *listed]), encoding="utf-8")
    except OSError as error:
        raise PluginError(f"cannot write {file}: {error}") from None
    return left_out


def _homepage(plugin: Plugin) -> str | None:
    """The home page in the metadata of its distribution, if any."""
    urls = [entry.partition(",") for entry in plugin.metadata.get_all("Project-URL") or ()]
    named = {label.strip().lower(): url.strip() for label, _, url in urls}
    return plugin.metadata.get("Home-page") or named.get("homepage") or named.get("repository")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> None:
    rows = list(rows)
    if not rows:
        print(empty)
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
