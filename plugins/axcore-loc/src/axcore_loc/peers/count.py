"""Counts the lines that mention a feature in the sources of one release."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import warnings
from collections.abc import Mapping

from axcore_loc.lines import mentions
from axcore_loc.peers.systems import GENERATED, TESTS, System
from axcore_loc.peers.words import FEATURES, may_speak, speaks

HEAD = 1000
"""Number of characters at the top of a module that are searched for a note that it is generated."""


@dataclasses.dataclass(frozen=True)
class Count:
    """One feature in one release.

    Attributes:
        system, release, feature: what was counted.
        models: number of models.
        having: number of models that mention the feature.
        model_modules, model_lines: modules and lines of models that mention it.
        shared_modules, shared_lines: other modules and lines that mention it.
        median: median number of lines of the models that mention it.
    """

    system: str
    release: str
    feature: str
    models: int
    having: int
    model_modules: int
    model_lines: int
    shared_modules: int
    shared_lines: int
    median: float

    @property
    def per_model(self) -> float:
        """Mean number of lines of the models that mention it."""
        return self.model_lines / self.having if self.having else 0.0


def count(system: System, release: str, sources: Mapping[str, str]) -> list[Count]:
    """Counts, for each feature, the modules and lines of a release that mention it.

    Args:
        sources: path -> source. Tests, generated modules and files that Python cannot parse are skipped.
    """
    by_model: dict[str, collections.Counter[str]] = {}
    shared: collections.Counter[str] = collections.Counter()
    modules: collections.Counter[tuple[str, bool]] = collections.Counter()
    for path, source in sources.items():
        if not system.code.match(path) or TESTS.search(path) or GENERATED.search(source[:HEAD]):
            continue
        found = system.models.match(path)
        model = found["model"] if found else ""
        lines = _lines(source, model)
        modules.update((feature, bool(model)) for feature in lines)
        (by_model.setdefault(model, collections.Counter()) if model else shared).update(lines)
    return [_count(system, release, feature, by_model, modules, shared) for feature in FEATURES]


def _count(
    system: System,
    release: str,
    feature: str,
    by_model: Mapping[str, Mapping[str, int]],
    modules: Mapping[tuple[str, bool], int],
    shared: Mapping[str, int],
) -> Count:
    having = [lines[feature] for lines in by_model.values() if lines.get(feature)]
    return Count(
        system=system.name,
        release=release,
        feature=feature,
        models=len(by_model),
        having=len(having),
        model_modules=modules.get((feature, True), 0),
        model_lines=sum(having),
        shared_modules=modules.get((feature, False), 0),
        shared_lines=shared.get(feature, 0),
        median=statistics.median(having) if having else 0.0,
    )


def _lines(source: str, model: str) -> dict[str, int]:
    """Feature -> number of lines of a module that mention it, without zeros."""
    if not may_speak(source):
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escape sequences in the counted sources
        try:
            found = mentions(source, may_speak)
        except (SyntaxError, ValueError):
            return {}
    speaking = {
        feature: sum(any(speaks(name, feature, model) for name in names) for names in found.values())
        for feature in FEATURES
    }
    return {feature: lines for feature, lines in speaking.items() if lines}
