"""Refuses a jax and a flax that do not work together, in one sentence. Imported before flax is.

Some pairs that an installer resolves fail deep inside `import flax.nnx`: flax 0.12.8 on jax 0.11.2 does not find
`hijax.HiPrimitive`. Reading two versions costs a millisecond, and importing jax a second.
"""

from __future__ import annotations

import importlib.metadata
import re

from axcore.config.errors import AxcoreError

OLDEST = {"jax": "0.11.1", "flax": "0.12.9"}
"""The oldest versions that work with each other and with axcore; each newer pair up to now does too."""


def bad_pair() -> str:
    """What is wrong with the installed jax and flax, and how to mend it; `""` when nothing is."""
    found = {name: _version(name) for name in OLDEST}
    if all(version is not None and _numbers(version) >= _numbers(OLDEST[name]) for name, version in found.items()):
        return ""
    here = " and ".join(f"{name} {version}" if version else f"no {name}" for name, version in found.items())
    wanted = [f"{name}>={version}" for name, version in OLDEST.items()]
    return f"{here} are installed; axcore needs {' with '.join(wanted)}: pip install -U {' '.join(map(repr, wanted))}"


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
