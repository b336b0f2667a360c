"""`axcore launch --processes N -- train RECIPE ...`."""

from __future__ import annotations

import argparse
import sys

from axcore.cli.compose import Commands
from axcore.config import AxcoreError
from axcore.runtime.launch import launch


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "launch",
        help="run a command in several processes",
        description="Runs an axcore command in several processes on this machine, as one distributed run: "
        "axcore launch --processes 2 -- train quickstart --steps 20",
    )
    parser.add_argument("--processes", type=int, required=True, help="number of processes")
    parser.add_argument(
        "--timeout", type=float, help="seconds that a process waits for the others (default: AXCORE_TIMEOUT or 600)"
    )
    parser.add_argument("--devices-per-process", type=int, help="number of devices for each process (default: 1)")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND ...",
        help="the command to run, as in: -- train quickstart",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise AxcoreError("axcore launch requires a command after --, such as: -- train quickstart --steps 20")
    return launch(
        [sys.executable, "-m", "axcore", *command],
        processes=arguments.processes,
        timeout=arguments.timeout,
        devices_per_process=arguments.devices_per_process,
    )
