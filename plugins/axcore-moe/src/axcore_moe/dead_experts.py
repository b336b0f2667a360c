"""A warning about dead experts."""

from __future__ import annotations

import sys

from axcore.train import Callback, StepInfo

SUMMARY = "dead_experts"
"""The summary that `MoE` reports."""


class DeadExpertWarning(Callback):
    """Warns on stderr, once per layer, when experts receive almost no tokens."""

    class Config(Callback.Config):
        """No fields of its own."""

    first_process_only = True

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.warned: set[str] = set()

    def step(self, info: StepInfo) -> None:
        for name, count in info.metrics.items():
            layer, _, summary = name.rpartition(".")
            if summary == SUMMARY and count > 0 and name not in self.warned:
                self.warned.add(name)
                where = layer or "the model"
                print(
                    f"step {info.step}: {count:.0f} experts of {where} are dead: the router sends them almost no "
                    f"tokens. Raise the weight of the balance loss, or balance them with a selection bias "
                    f"(bias_rate=0.001).",
                    file=sys.stderr,
                )
