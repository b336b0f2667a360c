"""`axcore loc measure | check | peers`. Imports neither jax nor flax until a feature is measured."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code: 0, or 1 if the check or the proof fails."""
    parser = argparse.ArgumentParser(
        prog="axcore loc", description="Measures the lines that a feature costs in existing modules."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    measure = commands.add_parser("measure", help="measure a feature over N models x M attentions")
    measure.add_argument("feature", metavar="FEATURE[:KEY=VALUE,...]", help="as in --use")
    measure.add_argument("--models", type=int, metavar="N", help="number of models (default: all)")
    measure.add_argument("--slots", type=int, metavar="M", help="number of attentions (default: all)")
    measure.add_argument("--json", action="store_true", help="print all results as JSON")
    measure.set_defaults(run=_measure)

    check = commands.add_parser("check", help="check that adding a feature does not change existing modules")
    check.add_argument("--base", required=True, metavar="REV", help="the commit to compare the working tree with")
    check.add_argument("--budget", type=int, default=0, metavar="N", help="lines that may change in nn and recipes")
    check.add_argument("--json", action="store_true")
    check.set_defaults(run=_check)

    peers = commands.add_parser("peers", help="count lines in published releases of other systems")
    peers.add_argument("--json", action="store_true")
    peers.add_argument("--write", type=Path, metavar="DIR", help="folder for the tables, the data and the plots")
    peers.add_argument("--cache", type=Path, metavar="DIR", help="folder for downloads")
    peers.add_argument(
        "--source", action="append", default=[], metavar="NAME@VERSION=DIR", help="read a system from a checkout"
    )
    peers.set_defaults(run=_peers)

    parsed = parser.parse_args(arguments)
    return int(parsed.run(parsed))


def _measure(parsed: argparse.Namespace) -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the models are tiny, and accelerators start slowly
    from axcore_loc.measure import measure
    from axcore_loc.report import as_json, as_text

    found = measure(parsed.feature, parsed.models, parsed.slots, _progress)
    print(_json(as_json(found)) if parsed.json else as_text(found))
    return 0 if found.sound else 1


def _check(parsed: argparse.Namespace) -> int:
    from axcore_loc.check import check

    found = check(Path.cwd(), parsed.base, parsed.budget)
    print(_json(found.as_json()) if parsed.json else found.as_text())
    return 0 if found.passes else 1


def _peers(parsed: argparse.Namespace) -> int:
    from axcore_loc.peers import run

    found = run(parsed.cache, parsed.source, _progress)
    if parsed.write:
        found.write(parsed.write)
    print(_json(found.as_json()) if parsed.json else found.as_text())
    return 0


def _json(value: Any) -> str:
    return json.dumps(value, indent=2)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
