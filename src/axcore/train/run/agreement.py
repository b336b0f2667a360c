"""Checks before training that all processes run the same config and versions."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping

import jax

from axcore.config import AxcoreError, Config, flatten
from axcore.plugin import State, registry
from axcore.runtime.processes import gather
from axcore.train.checkpoint import state_layout

ABSENT = "absent"


def agree(cfg: Config) -> None:
    """Compares the config and the versions of plugins, axcore, jax and flax across all processes.

    The processes exchange a hash first, and the full contents only if the hashes differ.

    Raises:
        AxcoreError: they differ. Every process raises the same error, which lists the values of each.
    """
    if jax.process_count() == 1:
        return
    own = json.dumps(facts(cfg)).encode()
    if len(set(gather("the hash of the config", hashlib.sha256(own).digest()))) > 1:
        found = [json.loads(each) for each in gather("the config", own)]
        raise AxcoreError(
            f"the {len(found)} processes of this run have different configs or packages; nothing was trained. Start "
            f"all of them with the same packages and command. Differences:{state_layout.listed(differences(found))}"
        )


def facts(cfg: Config) -> dict[str, str]:
    """Everything that must be equal on all processes: versions, loaded plugins and config values."""
    versions = {f"version of {name}": importlib.metadata.version(name) for name in ("axcore", "flax", "jax", "jaxlib")}
    loaded = (plugin for plugin in registry().plugins.values() if plugin.state is State.LOADED)
    return {**versions, **{f"plugin {plugin.id}": str(plugin) for plugin in loaded}, **flatten(cfg)}


def differences(found: list[Mapping[str, str]]) -> list[str]:
    """One line per fact that differs, listing the processes that have each value."""
    lines = []
    for name in dict.fromkeys(name for each in found for name in each):
        holders: dict[str, list[int]] = {}
        for process, each in enumerate(found):
            holders.setdefault(each.get(name, ABSENT), []).append(process)
        if len(holders) > 1:
            each_value = (f"{value} on {_processes(numbers)}" for value, numbers in holders.items())
            lines.append(f"{name}: {'; '.join(each_value)}")
    return lines


def _processes(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"process{'es' if len(numbers) > 1 else ''} {shown}"
