"""`axcore doctor`."""

from __future__ import annotations

import argparse
import dataclasses
import json

from axcore.cli.compose import Commands
from axcore.doctor.installation import examine


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check this installation",
        description="Checks Python, jax and flax, the backends, every plugin and its offers, and required versions. "
        "Imports plugins in separate processes only. The exit code is 1 if something is wrong; a warning is for the "
        "author of a plugin.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    findings = list(examine())
    fine = all(finding.status != "wrong" for finding in findings)
    if arguments.json:
        found = {"schema": 1, "ok": fine, "findings": [dataclasses.asdict(finding) for finding in findings]}
        print(json.dumps(found, indent=2))
    else:
        for finding in findings:
            print(f"{finding.status:<9}{finding.check:<14}{finding.message}")
    return 0 if fine else 1
