"""Reports of a training run: the results of general-purpose compressors on the same text, and a plot of the losses."""

from __future__ import annotations

import json
import lzma
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _MUTED, _GRID = "#1a1a1a", "#6b6b6b", "#e4e4e4"
_TRAIN, _VALIDATION = "#4c78a8", "#d1495b"


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


def compression_bits_per_byte(chunks: Iterable[bytes]) -> dict[str, float]:
    """Compresses a text as one stream with zlib (level 9) and lzma (preset 9, extreme), including headers.

    Args:
        chunks: the text, in order. Only one chunk at a time is kept in memory.

    Returns:
        `zlib_bits_per_byte` and `lzma_bits_per_byte`: bits of compressed size per byte of the text.

    Raises:
        ValueError: the text is empty.
    """
    compressors: dict[str, _Compressor] = {
        "zlib": zlib.compressobj(9),
        "lzma": lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME),
    }
    sizes = dict.fromkeys(compressors, 0)
    total = 0
    for chunk in chunks:
        total += len(chunk)
        for name, compressor in compressors.items():
            sizes[name] += len(compressor.compress(chunk))
    if not total:
        raise ValueError("no bytes to compress")
    return {
        f"{name}_bits_per_byte": 8 * (sizes[name] + len(compressor.flush())) / total
        for name, compressor in compressors.items()
    }


def plot_losses(
    metrics_jsonl: Path,
    png: Path,
    *,
    title: str = "",
    baselines: Mapping[str, float] | None = None,
    bytes_per_token: float = 1.0,
) -> None:
    """Plots training loss, validation loss and the results of compressors against the step, as a PNG.

    Args:
        metrics_jsonl: one JSON object per line, with `step` and any of `train/loss` (nats per token) and
            `validation/bits_per_byte`. Non-finite values and an incomplete last line are skipped.
        png: the file to write. Its folder must exist.
        title: title of the plot.
        baselines: the result of `compression_bits_per_byte`, or any mapping `NAME_bits_per_byte` -> value.
        bytes_per_token: converts the training loss to bits per byte; 1 for a byte tokenizer.

    Raises:
        ValueError: there is nothing to plot, or a line before the last is not a JSON object with a `step`.
    """
    # matplotlib is slow to import. pyplot is avoided, since it keeps global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    nats = read_series(metrics_jsonl, "train/loss")
    train = [(step, loss / math.log(2) / bytes_per_token) for step, loss in nats]
    validation = read_series(metrics_jsonl, "validation/bits_per_byte")
    if not train and not validation:
        raise ValueError(f"{metrics_jsonl} has neither train/loss nor validation/bits_per_byte")

    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    labels = [(value, f"{_short(name)} {value:.2f}", _MUTED) for name, value in (baselines or {}).items()]
    for value, _, color in labels:
        axes.axhline(value, color=color, lw=1, ls=(0, (4, 3)), zorder=1)
    if train:
        steps, losses = zip(*train, strict=True)
        window = len(losses) // 40  # neighbours on either side; short runs are not smoothed
        if window:
            axes.plot(steps, losses, color=_TRAIN, lw=0.7, alpha=0.25)
        axes.plot(steps, smooth(losses, window), color=_TRAIN, lw=1.7)
        labels.append((smooth(losses, window)[-1], "training", _TRAIN))
    if validation:
        steps, values = zip(*validation, strict=True)
        axes.plot(steps, values, "o-", color=_VALIDATION, ms=5, lw=1.2, mec="white", mew=0.7, zorder=3)
        labels.append((values[-1], f"validation {values[-1]:.2f}", _VALIDATION))
    _style(axes, title, top=max(value for _, value in train + validation), values=[v for v, *_ in labels])
    _label_right(axes, labels)
    figure.savefig(png, format="png")


def _short(name: str) -> str:
    return name.removesuffix("_bits_per_byte")


def _style(axes: Axes, title: str, top: float, values: list[float]) -> None:
    """Sets limits, labels and colors. High losses at the start may be cut off, so the end of the run is legible."""
    low, high = min(values), min(top, 2.2 * max(values))
    margin = 0.08 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    axes.margins(x=0.01)
    axes.set_xlim(left=0)
    axes.set_title(title, loc="left", color=_INK, fontsize=12, fontweight="bold", pad=10)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("bits per byte", color=_INK)
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    axes.grid(axis="y", color=_GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, length=0, labelsize=9)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)


def _label_right(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Labels the end of each line to the right of the axes, without overlaps."""
    low, high = axes.get_ylim()
    values = [value for value, *_ in sorted(labels)]
    heights: list[float] = []
    for value in values:
        heights.append(max(value, heights[-1] + 0.05 * (high - low) if heights else value))
    moved_up = sum(heights) / len(heights) - sum(values) / len(values)
    for (_, text, color), height in zip(sorted(labels), heights, strict=True):
        where = ("axes fraction", "data")
        at = (1, height - moved_up)
        axes.annotate(text, at, (6, 0), where, "offset points", color=color, fontsize=9, va="center")


def read_series(metrics_jsonl: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of each line with a finite value of this name, sorted by step. The last line of a step counts.

    Raises:
        ValueError: a line before the last is not a JSON object with a `step`.
    """
    found: dict[int, float] = {}
    lines = metrics_jsonl.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            step, value = int(entry["step"]), entry.get(name)
        except (ValueError, KeyError, TypeError, AttributeError):
            if number == len(lines):
                break
            raise ValueError(f"{metrics_jsonl}, line {number}: not a JSON object with a step") from None
        if isinstance(value, int | float) and math.isfinite(value):
            found[step] = float(value)
    return sorted(found.items())


def smooth(values: Sequence[float], window: int) -> list[float]:
    """A moving average over each value and up to `window` values on either side.

    The window shrinks symmetrically near the start, so a steep initial fall is not flattened.
    """
    means = []
    for index in range(len(values)):
        reach = min(window, index)
        near = values[index - reach : index + reach + 1]
        means.append(sum(near) / len(near))
    return means
