"""The `axcore` command. On an AxcoreError, it prints the message to stderr and returns the exit code of the error."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from axcore import __version__
from axcore.cli import (
    aot,
    bench,
    doctor,
    explain,
    generate,
    golden,
    inspect,
    launch,
    listing,
    new_plugin,
    plan,
    rules,
    train,
    tune,
)
from axcore.cli.compose import Commands
from axcore.config import AxcoreError, did_you_mean
from axcore.plugin import Command, Plugin, PluginError, attributed, registry, resolve
from axcore.runtime import failures


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # escape characters that the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # raises here if the reader of a pipe has closed it
    except BrokenPipeError:  # `axcore plugins | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str]) -> int:
    try:
        parser, commands = _parser()
        name = arguments[0] if arguments else ""
        if name in commands.choices:
            _warn_of_claims(name)
        elif name != "--version":
            if name and (found := registry().find(Command, name)) is not None:
                return _offered(*found, arguments[1:])
            for offered in {offer.name: offer for _, offer in registry().offers(Command)}.values():
                if offered.name not in commands.choices:
                    commands.add_parser(offered.name, help=offered.summary.replace("%", "%%"), add_help=False)
            if name and not name.startswith("-"):
                near, known = did_you_mean(name, commands.choices), ", ".join(commands.choices)
                raise AxcoreError(f"there is no command {name!r}.{near} Known: {known}{registry().not_loaded()}")
        parsed, unknown = parser.parse_known_args(arguments)
        if unknown:
            near = did_you_mean(unknown[0], commands.choices[name]._option_string_actions)
            commands.choices[name].error(f"unrecognized arguments: {' '.join(unknown)}.{near}")
        return int(parsed.run(parsed) or 0)
    except AxcoreError as error:
        print("\n  ".join([f"axcore: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        failures.record(error)
        return int(error.exit_code)


def _offered(plugin: Plugin, command: Command, arguments: list[str]) -> int:
    """Runs a command of a plugin."""
    run = resolve(plugin, command)
    with attributed(f"command {command.name!r} ({plugin})", SystemExit, BrokenPipeError):
        code = run(arguments)
        if code is not None and not isinstance(code, int):
            raise PluginError(f"command {command.name!r} ({plugin}) returned {type(code).__name__}, not an exit code")
        return int(code or 0)


def _warn_of_claims(name: str) -> None:
    if name == "doctor":  # doctor reports problems of plugins itself
        return
    for plugin, offer in registry().offers(Command):
        if offer.name == name:
            print(f"axcore: {plugin} also offers a command {name!r}; running the built-in one", file=sys.stderr)


def _parser() -> tuple[argparse.ArgumentParser, Commands]:
    """The parser, with the built-in subcommands."""
    parser = argparse.ArgumentParser(prog="axcore", description="Compose, train and inspect large models.")
    parser.add_argument("--version", action="version", version=f"axcore {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run, shown = (train, launch, generate, aot, plan, tune, bench), (inspect, explain, golden, listing, rules)
    for builtin in (*run, *shown, new_plugin, doctor):
        builtin.add(commands)
    return parser, commands
