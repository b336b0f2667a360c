"""`axcore loc measure`: the lines that a feature costs in existing modules."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import axcore
import axcore.nn
import axcore.train  # noqa: F401 - loaded before the plugin, so that replaced objects are detected
from axcore.config import ConfigError, text
from axcore_loc import feature, integrations, workspace
from axcore_loc.evidence import Pair, Proof, composed, prove
from axcore_loc.fit import Fit, fit
from axcore_loc.integrations import BY_USE, CONTROLS, Integration
from axcore_loc.lines import changed_lines, mentions

OWNERS = ("core", "models", "recipe")
"""The owners of existing modules."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """The counted lines of an integration.

    Attributes:
        lines: (n, m) -> owner -> lines of existing modules that changed or that already mentioned the plugin.
        fit: fit of the sum over all owners.
        refused: the reason that this integration is impossible; empty if it is possible.
        same_recipes: whether the recipe of each pair equals the one that `axcore.use` produces.
    """

    integration: Integration
    lines: dict[tuple[int, int], dict[str, int]]
    fit: Fit
    refused: str = ""
    same_recipes: bool = True

    @property
    def full(self) -> dict[str, int]:
        """Lines by owner over all variants."""
        return self.lines[max(self.lines)]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The result of `axcore loc measure`."""

    feature: feature.Measured
    counted: Counted
    controls: tuple[Counted, ...]
    mentioned: dict[str, int]
    plugin_lines: int
    proof: Proof
    seconds: float
    """CPU time of this process, summed over cores."""

    @property
    def sound(self) -> bool:
        """Whether every variant has the feature, and every equivalent control has its expected order."""
        done = [each for each in self.controls if each.same_recipes]
        return self.proof.holds and bool(done) and all(each.fit.order == each.integration.expected for each in done)


def measure(
    use: str, num_models: int | None = None, num_slots: int | None = None, progress: Callable[[str], None] = print
) -> Measurement:
    """Measures a feature, named as in `--use`, over the first `num_models` x `num_slots` variants.

    Raises:
        AxcoreError: the feature does not exist, or too few variants exist or accept it.
    """
    start = time.process_time()
    objects = feature.core_objects()
    measured = feature.find(use)
    models, slots = workspace.names("models", num_models), workspace.names("attentions", num_slots)
    _refuse_too_few(measured, models, slots, {})
    existing = feature.existing_sources(measured)
    call = integrations.use_call(measured.name, measured.options)
    proven, having = prove(measured, models, slots, call, progress)
    models, slots = ([name for name in axis if name not in proven.refused] for axis in (models, slots))
    _refuse_too_few(measured, models, slots, proven.refused)
    names = feature.names_of(measured)
    there = {owner: sum(_mentioning(source, names) for source in each.values()) for owner, each in existing.items()}
    count = functools.partial(_count, models=models, slots=slots, call=call, names=names, there=there)
    counted = count(BY_USE)
    texts = {pair: text(cfg) for pair, cfg in having.items()}
    controls = tuple(count(each, **_control(each, models, slots, call, texts)) for each in CONTROLS)
    own = workspace.sources(models, slots)
    mentioned = there | {"models": sum(_mentioning(source, names) for source in own.values())}
    proven = dataclasses.replace(
        proven,
        replaced=tuple(feature.replaced(objects, feature.core_objects())),
        written=tuple(_written(existing, feature.existing_sources(measured))),
    )
    seconds = time.process_time() - start
    return Measurement(measured, counted, controls, mentioned, feature.size(measured), proven, seconds)


def _refuse_too_few(
    measured: feature.Measured, models: Sequence[str], slots: Sequence[str], refused: Mapping[str, str]
) -> None:
    if min(len(models), len(slots)) < 2:
        needed = f"measuring {measured.name} requires at least two models and two attentions"
        raise ConfigError("\n".join([f"{needed}, not {len(models)} and {len(slots)}", *refused.values()]))


def _count(
    integration: Integration,
    models: Sequence[str],
    slots: Sequence[str],
    call: str,
    names: frozenset[str],
    there: Mapping[str, int],
    **more: Any,
) -> Counted:
    """Counts the lines of an integration for every number of models and attentions.

    Args:
        names: names that refer to the plugin.
        there: owner -> lines of other existing modules that mention the plugin.
    """
    lines = {}
    for n in range(1, len(models) + 1):
        for m in range(1, len(slots) + 1):
            old = workspace.sources(models[:n], slots[:m])
            new = integration.edit(old, call)
            by_owner = {owner: there.get(owner, 0) for owner in OWNERS}
            for path in old.keys() | new.keys():
                before, after = old.get(path, ""), new.get(path, "")
                by_owner[workspace.owner(path)] += changed_lines(before, after) + _mentioning(before, names)
            lines[n, m] = by_owner
    return Counted(integration, lines, fit({at: sum(each.values()) for at, each in lines.items()}), **more)


def _control(
    integration: Integration, models: Sequence[str], slots: Sequence[str], call: str, texts: Mapping[Pair, str]
) -> dict[str, Any]:
    """Composes the recipes of a control and compares them with those of `axcore.use`; see `Counted`."""
    edited = integration.edit(workspace.sources(models, slots), call)
    with workspace.installed(edited):
        made, refused = composed(edited)
    why = next(iter(refused.values()), "")
    same = not why and all(text(cfg) == texts[pair] for pair, cfg in made.items())
    return {"refused": why, "same_recipes": same}


@functools.cache
def _mentioning(source: str, names: frozenset[str]) -> int:
    """Lines of a module that mention the plugin."""
    return len(mentions(source, names.__contains__))


def _written(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> Iterator[str]:
    """Loaded modules of these sources whose files have changed."""
    for owner, files in before.items():
        for path in files.keys() & after[owner].keys():
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            if module in sys.modules and files[path] != after[owner][path]:
                yield path
