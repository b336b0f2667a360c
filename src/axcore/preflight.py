"""Checks that the installed versions of jax and flax work together. Imported before flax.

Installers resolve some pairs that fail deep inside `import flax.nnx`: flax 0.12.8 with jax 0.11.2 does not find
`hijax.HiPrimitive`. Reading two versions takes a millisecond; importing jax takes a second.
"""

from __future__ import annotations

import importlib.metadata
import re

from axcore.config.errors import AxcoreError

OLDEST = {"jax": "0.11.1", "flax": "0.12.9"}
"""The oldest versions that work with each other and with axcore. All newer pairs released so far also work."""


def bad_pair() -> str:
    """An error message if the installed jax and flax are too old, with the command that upgrades them; else `""`."""
    found = {name: _version(name) for name in OLDEST}
    if all(version is not None and _numbers(version) >= _numbers(OLDEST[name]) for name, version in found.items()):
        return ""
    here = " and ".join(f"{name} {version}" if version else f"no {name}" for name, version in found.items())
    wanted = [f"{name}>={version}" for name, version in OLDEST.items()]
    command = f"pip install -U {' '.join(map(repr, wanted))}"
    return f"{here} are installed, but axcore requires {' and '.join(wanted)}: {command}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """`0.12.9rc1` -> (0, 12, 9)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


if problem := bad_pair():
    raise AxcoreError(problem)
