"""Ends a run that no longer improves."""

from __future__ import annotations

from collections.abc import Mapping

import axcore as ax
from axcore.train import Callback, CallbackRequest


class Patience(Callback):
    """Ends a run after `evaluations` evaluations in a row without a lower value of `metric`."""

    class Config(Callback.Config):
        metric: str = "validation/loss"
        evaluations: ax.PositiveInt = 3

    config: Config

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.values: list[float] = []

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> CallbackRequest | None:
        """See `Callback.evaluation`."""
        cfg = self.config
        self.values.append(metrics[cfg.metric])
        if len(self.values) - 1 - self.values.index(min(self.values)) < cfg.evaluations:
            return None
        reason = f"{cfg.metric} has not improved in {cfg.evaluations} evaluations"
        return CallbackRequest(stop=True, reason=reason, deterministic=True)

    def state(self) -> dict[str, list[float]]:
        """See `Callback.state`."""
        return {"values": self.values}

    def set_state(self, state: Mapping[str, object]) -> None:
        """See `Callback.set_state`."""
        values = state["values"]
        assert isinstance(values, list)
        self.values = values
