"""Reports: what a run says about itself when it ends."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from axcore import config


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A run that has trained.

    Attributes:
        cfg: the trainer's config.
        folder: the run folder; reports write their files here.
        model: the trained module, holding its arrays.
        input: the input that it was trained on.
        summary: what is known so far; it goes to `summary.json`.
    """

    cfg: Any
    folder: Path
    model: Any
    input: Any
    summary: dict[str, Any]


class Report(config.Configurable):
    """Base of reports: called once, after the last step and the last evaluation, in the order of the config."""

    class Config(config.Config):
        """Fields of the report."""

    def __init__(self, cfg: Any):
        self.config = cfg

    def __call__(self, run: FinishedRun) -> dict[str, Any]:
        """Returns entries for `summary.json`, and may write files into the run folder."""
        raise NotImplementedError
