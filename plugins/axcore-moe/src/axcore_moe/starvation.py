"""Telling the user of a run that experts have starved."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from axcore.train.callbacks.writers import Writer

SUMMARY = "starved"
"""What `MoE` reports."""


class StarvationWarning(Writer):
    """Writes no file: it warns on the terminal, once for each layer, when experts of it have starved."""

    class Config(Writer.Config):
        """No fields."""

    def __init__(self, cfg: Config, folder: Path):
        del cfg, folder
        self.warned: set[str] = set()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, count in values.items():
            layer, _, summary = name.removeprefix("train/").rpartition(".")
            if summary == SUMMARY and count > 0 and name not in self.warned:
                self.warned.add(name)
                where = layer or "the model"
                print(
                    f"step {step}: {count:.0f} experts of {where} have starved: the router sends them almost nothing. "
                    f"Raise the weight of the balance loss, or let a selection bias balance them (bias_rate=0.001)",
                    file=sys.stderr,
                )

    def rewind(self, step: int) -> None:
        """Nothing is kept."""

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """Nothing is open."""
