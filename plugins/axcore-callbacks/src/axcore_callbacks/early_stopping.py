"""Early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from axcore.config import ConfigError, NonNegativeFloat, PositiveInt
from axcore.train import Callback, CallbackRequest, RunInfo


class EarlyStopping(Callback):
    """Ends the run after `patience` evaluations in a row without improvement."""

    class Config(Callback.Config):
        metric: str = "validation/loss"
        """An evaluation metric, `EVALUATOR/METRIC`."""
        patience: PositiveInt = 3
        min_delta: NonNegativeFloat = 0.0
        """An evaluation counts as an improvement if it is better than the best one by more than this amount."""
        mode: Literal["min", "max"] = "min"

    config: Config

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.best: float | None = None
        self.waited = 0

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> CallbackRequest | None:
        cfg = self.config
        if cfg.metric not in metrics:
            raise ConfigError(f"metric={cfg.metric!r} is not a metric of this run. Choose one of: {', '.join(metrics)}")
        value = metrics[cfg.metric] if cfg.mode == "min" else -metrics[cfg.metric]
        if not math.isnan(value) and (self.best is None or value < self.best - cfg.min_delta):
            self.best, self.waited = value, 0
            return None
        self.waited += 1
        return self._verdict()

    def start(self, run: RunInfo) -> CallbackRequest | None:
        return self._verdict()  # a resumed run stops again, unless `patience` was increased

    def _verdict(self) -> CallbackRequest | None:
        if self.waited < self.config.patience:
            return None
        reason = f"{self.config.metric} has not improved in {self.waited} evaluations"
        return CallbackRequest(stop=True, reason=reason, deterministic=True)

    def state(self) -> Mapping[str, float | int | None]:
        return {"best": self.best, "waited": self.waited}

    def set_state(self, state: Mapping[str, object]) -> None:
        best, waited = state["best"], state["waited"]
        assert isinstance(waited, int) and (best is None or isinstance(best, float))
        self.best, self.waited = best, waited
