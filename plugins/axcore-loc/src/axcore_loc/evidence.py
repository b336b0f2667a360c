"""Evidence that variants have a feature."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from axcore.config import AxcoreError
from axcore.plugin import recipe
from axcore_loc import proof, workspace
from axcore_loc.feature import Measured
from axcore_loc.integrations import BY_USE
from axcore_loc.places import Role, places

Pair = tuple[str, str]
"""A model and an attention."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """The proof that variants have the feature.

    Attributes:
        roles: the places where the feature was attached, over all variants.
        by_shapes, by_numbers: number of variants checked.
        brought: number of nodes of the plugin in the configs of all variants.
        new_parameters: number of parameters that the plugin added, over all variants.
        refused: models and attentions that the feature rejects with every partner, and the reason. The other attributes
            exclude them.
        faults: pair -> evidence against the feature.
        replaced: objects of the core that the plugin replaced while it ran.
        written: existing modules whose files changed while the plugin ran.
    """

    roles: tuple[Role, ...]
    by_shapes: int
    by_numbers: int
    brought: int
    new_parameters: int
    refused: dict[str, str]
    faults: dict[str, list[str]]
    replaced: tuple[str, ...]
    written: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not (self.faults or self.replaced or self.written)


def composed(sources: workspace.Sources) -> tuple[dict[Pair, Any], dict[Pair, str]]:
    """The recipe of each pair, and the reason for each pair that cannot be composed."""
    made: dict[Pair, Any] = {}
    refused: dict[Pair, str] = {}
    for pair in workspace.recipe_names(sources):
        try:
            made[pair] = recipe("-".join(pair))
        except AxcoreError as error:
            refused[pair] = str(error)
    return made, refused


def prove(
    measured: Measured,
    models: Sequence[str],
    slots: Sequence[str],
    call: str,
    progress: Callable[[str], None],
) -> tuple[Proof, dict[Pair, Any]]:
    """Builds every pair without and with the feature, and checks that the second has the feature.

    Returns:
        The proof, and the recipes that have the feature.
    """
    before = workspace.sources(models, slots)
    after = BY_USE.edit(before, call)
    progress(f"composing {len(models)} x {len(slots)} recipes without and with {measured.name}")
    with workspace.installed(before):
        without, _ = composed(before)
    with workspace.installed(after):
        having, refused = composed(after)
        return _prove(measured, without, having, refused, progress), having


def _prove(
    measured: Measured,
    without: dict[Pair, Any],
    having: dict[Pair, Any],
    refused: dict[Pair, str],
    progress: Callable[[str], None],
) -> Proof:
    found = {pair: places(without[pair], cfg, measured.package) for pair, cfg in having.items()}
    shaped: dict[Pair, proof.Shapes] = {}
    faults: dict[Pair, list[str]] = collections.defaultdict(list)
    for index, (pair, cfg) in enumerate(having.items()):
        if index % 20 == 0:
            progress(f"by shapes: {index} of {len(having)}")
        try:
            built = proof.build(cfg)
            shaped[pair] = proof.by_shapes(proof.build(without[pair]), built, found[pair], cfg)
            faults[pair] += shaped[pair].faults
        except AxcoreError as error:
            refused = {**refused, pair: str(error)}
        except Exception as error:  # an error in one variant must not stop the others
            faults[pair].append(f"cannot be built: {type(error).__name__}: {error}")

    left_out = dropped([*without], refused)
    kept = [pair for pair in without if not left_out.keys() & {*pair}]
    for pair in kept:
        if pair in refused:
            faults[pair].append(f"refused: {refused[pair]}")
    roles = {role for pair in shaped for role in found[pair].anchors.values()}
    for pair in shaped:
        faults[pair] += [f"the feature is not at {path}" for path in found[pair].missing(roles)]

    chosen = [pair for pair in dict.fromkeys(some(kept)) if pair in shaped]
    for index, pair in enumerate(chosen):
        if index % 5 == 0:
            progress(f"by numbers: {index} of {len(chosen)}")
        changes_model = any(path.split(".")[0] == "model" for path in (*found[pair].anchors, *found[pair].brought))
        try:
            faults[pair] += proof.by_numbers(without[pair], having[pair], shaped[pair], changes_model).faults
        except Exception as error:
            faults[pair].append(f"cannot be trained: {type(error).__name__}: {error}")
    return Proof(
        refused=left_out,
        roles=tuple(sorted(roles, key=str)),
        by_shapes=len(shaped),
        by_numbers=len(chosen),
        brought=sum(len(found[pair].brought) for pair in shaped),
        new_parameters=sum(len(shapes.new_parameters) for shapes in shaped.values()),
        faults={"-".join(pair): list(dict.fromkeys(told)) for pair, told in faults.items() if told},
        replaced=(),
        written=(),
    )


def dropped(pairs: list[Pair], refused: dict[Pair, str]) -> dict[str, str]:
    """The models and attentions that are rejected with every partner, and the reason."""
    found = {}
    for axis in (0, 1):
        for name in dict.fromkeys(pair[axis] for pair in pairs):
            why = {refused.get(pair) for pair in pairs if pair[axis] == name}
            if None not in why:
                found[name] = str(why.pop())
    return found


def some(pairs: list[Pair]) -> Iterator[Pair]:
    """Pairs that include each model and each attention at least once."""
    models, slots = ([*dict.fromkeys(pair[axis] for pair in pairs)] for axis in (0, 1))
    for index in range(max(len(models), len(slots))):
        yield models[index % len(models)], slots[index % len(slots)]
