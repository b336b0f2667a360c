"""The evaluation schedule and the evaluators that compute metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping

from axcore import config
from axcore.config import ConfigError, FrozenDict, under
from axcore.train.callbacks import returned
from axcore.train.callbacks.base import Callback, CallbackRequest, RunInfo
from axcore.train.callbacks.snapshot import Snapshot
from axcore.train.errors import TrainingError


class Evaluator(config.Configurable):
    """Base class of evaluators, which compute metrics of a model; see `Evaluation.Config.evaluators`.

    ```python
    class Perplexity(ValidationLoss):
        class Config(ValidationLoss.Config):
            pass

        def __call__(self, model):
            total, count = self.sums(model)
            return {"perplexity": math.exp(total / count)}
    ```
    """

    class Config(config.Config):
        """Subclasses add their fields."""

    def __init__(self, cfg: Config):
        self.config = cfg

    def start(self, run: RunInfo) -> None:
        """Called before the first step. Raises if the run lacks something that this evaluator requires."""

    def __call__(self, model: Snapshot) -> Mapping[str, float]:
        """Returns metric values by name. A metric is reported as `EVALUATOR/METRIC`, for instance `validation/loss`."""
        raise NotImplementedError


class ValidationLoss(Evaluator):
    """Reports `loss`: the mean of the objective over the validation tokens, in nats per token."""

    class Config(Evaluator.Config):
        weights: str | None = None
        """Evaluate the parameters that this callback keeps, such as a moving average. None: the model's parameters."""

    config: Config

    def __call__(self, model: Snapshot) -> Mapping[str, float]:
        total, count = self.sums(model)
        return {"loss": total / count}

    def start(self, run: RunInfo) -> None:
        name, kept = self.config.weights, run.program.state.callbacks
        if name is not None and "params" not in kept.get(name, {}):
            raise ConfigError(
                f"weights={name!r} is not a callback that keeps parameters. Choose one of: "
                f"{', '.join(key for key, tree in kept.items() if 'params' in tree) or 'none'}"
            )

    def sums(self, model: Snapshot) -> tuple[float, float]:
        """Total and count of the objective over all validation batches."""
        params, total, count = model.params(self.config.weights), 0.0, 0.0
        for batch in model.validation_batches():
            summed, weights = model.loss(batch, params)
            total, count = total + float(summed), count + float(weights)
        if not math.isfinite(total):
            raise TrainingError(
                f"the validation loss after step {model.step} is {total}. Earlier checkpoints are unchanged."
            )
        return total, count


class BitsPerByte(ValidationLoss):
    """Reports `loss`, and `bits_per_byte`: the bits to encode the validation text, divided by its bytes."""

    class Config(ValidationLoss.Config):
        """The fields of `ValidationLoss`."""

    def __call__(self, model: Snapshot) -> Mapping[str, float]:
        total, count = self.sums(model)
        return {"loss": total / count, "bits_per_byte": total / math.log(2) / model.input.validation_byte_count}


class Evaluation(Callback):
    """Runs evaluators every few steps and at the end of the run."""

    class Config(Callback.Config):
        every_steps: config.PositiveInt | None = None
        """Steps between evaluations. None evaluates only at the end."""
        evaluators: Mapping[str, Evaluator.Config] = FrozenDict(validation=BitsPerByte.Config())

    config: Config

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.evaluators: dict[str, Evaluator] = {}
        for name, evaluator in cfg.evaluators.items():
            with under(f"evaluators.{name}"):
                self.evaluators[name] = evaluator.build()

    def start(self, run: RunInfo) -> None:
        for name, evaluator in self.evaluators.items():
            with under(f"evaluators.{name}"):
                evaluator.start(run)

    def due(self, step: int) -> CallbackRequest | None:
        every = self.config.every_steps
        return CallbackRequest(evaluate=True, deterministic=True) if every and step % every == 0 else None

    def evaluate(self, model: Snapshot) -> Mapping[str, float]:
        return {
            f"{name}/{metric}": value
            for name, evaluator in self.evaluators.items()
            for metric, value in returned.metrics(evaluator(model), f"evaluators.{name}").items()
        }
