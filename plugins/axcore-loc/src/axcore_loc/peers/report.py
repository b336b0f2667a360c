"""The output of `axcore loc peers`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from axcore_loc.peers.count import Count
from axcore_loc.peers.plot import plot
from axcore_loc.peers.systems import SYSTEMS
from axcore_loc.peers.words import FEATURES

PAPER = {
    "megatron-core": {"RoPE": ("O(NM)", 400), "MoE": ("O(N)", 20)},
    "deepspeed": {"RoPE": ("O(NM)", 320), "MoE": ("O(NM)", 4000)},
    "torchtitan": {"RoPE": ("O(NM)", 240), "MoE": ("O(NM)", 400)},
    "flax examples": {"RoPE": ("O(NM)", 600)},
    "praxis and paxml": {"RoPE": ("O(NM)", 300), "MoE": ("O(M)", 5)},
    "maxtext": {"RoPE": ("O(NM)", 200), "MoE": ("O(NM)", 300)},
    "axlearn": {"RoPE": ("O(1)", 0), "MoE": ("O(1)", 0)},
}
"""Table 2 of the AXLearn paper (arXiv 2507.05411), for 20 models x 10 attentions, as transcribed by others."""

PAPER_MODELS = 20
TREND_FROM = 3
"""Number of releases required for a trend."""


@dataclasses.dataclass(frozen=True)
class Peers:
    """All counts, and the reasons for missing releases."""

    counts: tuple[Count, ...]
    missing: dict[str, str]

    def of(self, system: str, feature: str) -> list[Count]:
        """The counts of one system, oldest release first."""
        return [each for each in self.counts if (each.system, each.feature) == (system, feature)]

    def trend(self, system: str, feature: str) -> float | None:
        """Lines in models per added model, by least squares over releases. None for too few releases."""
        found = self.of(system, feature)
        if len(found) < TREND_FROM or len({each.models for each in found}) < 2:
            return None
        return float(np.polyfit([each.models for each in found], [each.model_lines for each in found], 1)[0])

    def as_json(self) -> dict[str, Any]:
        return {
            "counts": [dataclasses.asdict(each) | {"per_model": round(each.per_model, 1)} for each in self.counts],
            "trends": {
                system.name: {feature: self.trend(system.name, feature) for feature in FEATURES} for system in SYSTEMS
            },
            "paper": PAPER,
            "missing": self.missing,
        }

    def as_text(self) -> str:
        """The tables, as Markdown."""
        lines: list[str] = []
        for feature in FEATURES:
            lines += [f"### {feature}", "", *self._table(feature), ""]
        lines += [f"- {system.name}: {system.note}" for system in SYSTEMS if system.note]
        lines += [f"- Not counted: {release}: {why}" for release, why in self.missing.items()]
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """Writes `peers.json`, `peers.md` and one plot for each feature."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "peers.json").write_text(json.dumps(self.as_json(), indent=1) + "\n")
        (folder / "peers.md").write_text(self.as_text() + "\n")
        for feature in FEATURES:
            found = {system.name: self.of(system.name, feature) for system in SYSTEMS}
            (folder / f"peers-{feature.lower()}.svg").write_text(plot(feature, found))

    def _table(self, feature: str) -> list[str]:
        rows = [
            "| system | release | models | with it | modules | lines in models | a model (median) | shared lines | "
            "lines for each model added | paper, 20 x 10 |",
            "|---|---|--:|--:|--:|--:|--:|--:|--:|---|",
        ]
        for system in SYSTEMS:
            found = self.of(system.name, feature)
            for each in found:
                last = each is found[-1]
                trend = self.trend(system.name, feature) if last else None
                order, lines = PAPER.get(system.name, {}).get(feature, ("", ""))
                cells = [
                    each.system,
                    _release(each),
                    each.models,
                    each.having,
                    each.model_modules,
                    each.model_lines,
                    f"{each.per_model:.1f} ({each.median:g})",
                    each.shared_lines,
                    "" if trend is None else f"{trend:.1f}",
                    f"{order}, {lines}" if last and order else "",
                ]
                rows.append(f"| {' | '.join(map(str, cells))} |")
        return rows


def _release(each: Count) -> str:
    """The release without the system's own name."""
    if each.release.endswith("@installed"):
        return f"{importlib.metadata.version(each.system)}, installed"
    return re.sub(r"^[\w-]+(==|@)", "", each.release) if "," not in each.release else each.release.replace("==", " ")
