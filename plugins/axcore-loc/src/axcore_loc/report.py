"""The output of `axcore loc measure`, as text and as JSON."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from axcore_loc.fit import Fit
from axcore_loc.measure import OWNERS, Counted, Measurement

SHOWN_FAULTS = 10


def as_json(found: Measurement) -> dict[str, Any]:
    """The measurement as plain values.

    `order` is null if the proof failed. `lines` counts lines of existing modules by owner, and of the plugin itself.
    """
    n, m = max(found.counted.lines)
    full = found.counted.full
    return {
        "feature": found.feature.name,
        "options": dict(found.feature.options),
        "plugin": found.feature.plugin.distribution,
        "order": found.counted.fit.order if found.sound else None,
        "lines_in_models": full["models"],
        "lines": {**full, "plugin": found.plugin_lines},
        "mentioned_before": found.mentioned,
        "variants": n * m,
        "models": n,
        "slots": m,
        "fit": _fit(found.counted.fit),
        "counts": [{"n": n, "m": m, **lines} for (n, m), lines in found.counted.lines.items()],
        "controls": [_control(each) for each in found.controls],
        "proof": {
            "holds": found.proof.holds,
            "by_shapes": found.proof.by_shapes,
            "by_numbers": found.proof.by_numbers,
            "places": [str(role) for role in found.proof.roles],
            "nodes_brought": found.proof.brought,
            "new_parameters": found.proof.new_parameters,
            "core_objects_replaced": list(found.proof.replaced),
            "existing_files_written": list(found.proof.written),
            "refused": found.proof.refused,
            "faults": found.proof.faults,
        },
        "versions": {
            name: importlib.metadata.version(name)
            for name in dict.fromkeys(("axcore", "axcore-loc", found.feature.plugin.distribution, "jax", "flax"))
        },
        "cpu_seconds": round(found.seconds, 1),
    }


def _fit(fit: Fit) -> dict[str, float]:
    return {
        "constant": fit.constant,
        "n": fit.per_model,
        "m": fit.per_slot,
        "nm": fit.per_pair,
        "residual": fit.residual,
    }


def _control(each: Counted) -> dict[str, Any]:
    done = {"lines": each.full, "fit": _fit(each.fit), "order": each.fit.order, "same_recipes": each.same_recipes}
    return {"name": each.integration.name, "expected": each.integration.expected, "refused": each.refused or None} | (
        {} if each.refused else done
    )


def as_text(found: Measurement) -> str:
    """The measurement for a reader."""
    (n, m), measured, proof = max(found.counted.lines), found.feature, found.proof
    order = found.counted.fit.order if found.sound else "NOT PROVEN"
    corners = [(1, 1), (n, 1), (1, m), (n, m)]
    rows = [["lines of existing modules", *(f"{n} x {m}" for n, m in corners)]]
    for owner in OWNERS:
        rows.append([f"  {owner}", *(str(found.counted.lines[corner][owner]) for corner in corners)])
    lines = [
        f"{measured.name} ({measured.plugin}) in {n} models x {m} attentions: {order}",
        "",
        *_table(rows),
        f"of these, lines that already mentioned the plugin: {_by_owner(found.mentioned)}",
        f"the plugin itself: {found.plugin_lines} lines",
        f"fit: {_formula(found.counted.fit)}",
        "",
        f"attached at: {', '.join(map(str, proof.roles)) or 'nowhere'}",
        f"proven by shapes: {proof.by_shapes} of {n * m}, {proof.brought} nodes of the plugin, "
        f"{proof.new_parameters} new parameters, each in the loss",
        f"proven by numbers: {proof.by_numbers}, which include every model and every attention",
        f"core objects replaced: {len(proof.replaced)}; existing files written: {len(proof.written)}",
        "",
        "controls, which must not be O(1):",
    ]
    for each in found.controls:
        told = f"impossible: {each.refused}" if each.refused else f"{each.fit.order}, {sum(each.full.values())} lines"
        differs = "" if each.refused or each.same_recipes else ", DIFFERENT RECIPES"
        lines.append(f"  {each.integration.name}: {told}{differs}")
    lines += [f"refused by the feature, not counted: {name}: {why}" for name, why in proof.refused.items()]
    lines += [f"replaced: {name}" for name in proof.replaced] + [f"written: {path}" for path in proof.written]
    shown = list(proof.faults.items())[:SHOWN_FAULTS]
    lines += [f"{pair}: {told}" for pair, faults in shown for told in faults]
    if len(proof.faults) > len(shown):
        lines.append(f"... and {len(proof.faults) - len(shown)} more variants (--json shows all)")
    return "\n".join(lines)


def _formula(fit: Fit) -> str:
    terms = [(fit.constant, ""), (fit.per_model, " n"), (fit.per_slot, " m"), (fit.per_pair, " n m")]
    shown = " + ".join(f"{factor:g}{term}" for factor, term in terms if factor) or "0"
    return f"{shown} = {fit.order}, at most {fit.residual:g} lines off"


def _by_owner(lines: dict[str, int]) -> str:
    return ", ".join(f"{owner} {lines.get(owner, 0)}" for owner in OWNERS)


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(widths[0]) if not index else cell.rjust(widths[index]) for index, cell in enumerate(row))
        for row in rows
    ]
