"""The `axcore` command. Every failure that a user can mend is one message on stderr and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from axcore import __version__
from axcore.cli import aot, golden, inspect, listing, train
from axcore.config import AxcoreError
from axcore.plugin import Command, registry, resolve

USAGE_ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # here, where a reader that has gone can be handled
    except BrokenPipeError:  # `axcore plugins | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str]) -> int:
    try:
        parser, builtin = _parser()
        found = registry().find(Command, arguments[0]) if arguments else None
        if found is not None and arguments[0] in builtin:
            print(f"axcore: {found[0]} offers a command {arguments[0]!r} too; the built-in one runs", file=sys.stderr)
        elif found is not None:
            return int(resolve(*found)(arguments[1:]) or 0)
        parsed = parser.parse_args(arguments)
        return int(parsed.run(parsed) or 0)
    except AxcoreError as error:
        print(f"axcore: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("axcore: interrupted; what was saved can be resumed with --resume", file=sys.stderr)
        return INTERRUPTED


def _parser() -> tuple[argparse.ArgumentParser, set[str]]:
    """The parser, and the names of the built-in commands."""
    parser = argparse.ArgumentParser(prog="axcore", description="Compose, train and inspect large models.")
    parser.add_argument("--version", action="version", version=f"axcore {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train.add(commands)
    aot.add(commands)
    inspect.add(commands)
    golden.add(commands)
    listing.add(commands)
    builtin = set(commands.choices)
    for name, summary in {offer.name: offer.summary for _, offer in registry().offers(Command)}.items():
        if name not in builtin:
            commands.add_parser(name, help=summary.replace("%", "%%"), add_help=False)
    return parser, builtin
