"""Draws the plot as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from axcore_loc.peers.count import Count

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 40, 50
COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#9c6b4e", "#1b1e23")


def plot(feature: str, found: Mapping[str, Sequence[Count]]) -> str:
    """Plots the lines of models that mention a feature against the number of models, on logarithmic axes.

    Each system is a line through its releases. Counts of zero are at the bottom of the plot.
    """
    points = [each for counts in found.values() for each in counts if each.models]
    x_end = _next_power(max((each.models for each in points), default=1))
    y_end = _next_power(max((each.model_lines for each in points), default=1))

    def x(models: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log10(models) / math.log10(x_end)

    def y(lines: float) -> float:
        share = 0.0 if lines <= 0 else (1 + math.log10(lines)) / (1 + math.log10(y_end))
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, f"Lines in models that mention {feature}, by number of models", size=15),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "models in the release", anchor="middle"),
    ]
    for value in _powers(x_end):
        parts.append(_grid(x(value), TOP, x(value), HEIGHT - BOTTOM))
        parts.append(_text(x(value), HEIGHT - BOTTOM + 18, f"{value}", anchor="middle"))
    for value in (0, *_powers(y_end)):
        parts.append(_grid(LEFT, y(value), WIDTH - RIGHT, y(value)))
        parts.append(_text(LEFT - 8, y(value) + 4, f"{value}", anchor="end"))
    for index, (name, counts) in enumerate(found.items()):
        color = COLORS[index % len(COLORS)]
        at = [(x(each.models), y(each.model_lines)) for each in counts if each.models]
        if len(at) > 1:
            joined = " ".join(f"{px:.1f},{py:.1f}" for px, py in at)
            parts.append(f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{color}"/>' for px, py in at]
        row = TOP + 14 + 20 * index
        parts.append(f'<circle cx="{WIDTH - RIGHT + 20}" cy="{row - 4}" r="5" fill="{color}"/>')
        parts.append(_text(WIDTH - RIGHT + 32, row, name if at else f"{name} (none)"))
    return "\n".join([*parts, "</svg>", ""])


def _next_power(value: float) -> int:
    return int(10 ** max(1, math.ceil(math.log10(max(value, 1)))))


def _powers(end: int) -> Iterator[int]:
    return (10**power for power in range(round(math.log10(end)) + 1))


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#333333">{escape(text)}</text>'
    )
