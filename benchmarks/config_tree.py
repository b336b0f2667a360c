"""Time of operations on a config tree of a thousand nodes.

Prints a JSON object on the last line, with medians: `edit_ms` (setting one field of every attention layer; limit 20),
`text_ms` (limit 50) and `diff_ms` (limit 100).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import axcore as ax
from axcore.config import walk
from axcore.nn import Attention, FeedForward, TransformerLayer


class Tower(ax.Config):
    """Independent layers."""

    layers: tuple[TransformerLayer.Config, ...]


def milliseconds(fn: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        fn()
        times.append(1e3 * (time.perf_counter() - began))
    return round(statistics.median(times), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    layer = TransformerLayer.Config(attention=Attention.Config(num_heads=4), ffn=FeedForward.Config(hidden_dim=8))
    each = sum(1 for _ in walk(layer))
    tower = Tower(layers=(layer,) * -(-arguments.nodes // each))
    edited = ax.select(tower, Attention).set(num_heads=8)
    figures = {
        "edit_ms": milliseconds(lambda: ax.select(tower, Attention).set(num_heads=8), arguments.rounds),
        "text_ms": milliseconds(tower.text, arguments.rounds),
        "diff_ms": milliseconds(lambda: edited.diff(tower), arguments.rounds),
        "nodes": sum(1 for _ in walk(tower)),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
