"""What training minimizes: objectives report a sum and a count, so that parts of a batch add up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from axcore import config
from axcore.module import Functional, LossSum, Tree, current
from axcore.nn import MASKED_LOGIT, Prediction
from axcore.nn.pieces import in_pieces

Batch = Mapping[str, jax.Array]


class Objective(config.Configurable):
    """Base of objectives: a model and a batch -> the loss.

    It runs in the model's own frame: it may call the model's methods, and `axcore.current()` reports further losses
    (`add_loss`), summaries and draws. The training step minimizes `total / count` of what it returns plus the losses
    that it and the layers add, each over the whole batch, however many microbatches and devices that is cut into.
    """

    class Config(config.Config):
        """Fields of the objective."""

    config: Any

    def __init__(self, cfg: Any):
        self.config = cfg

    def __call__(self, model: Any, batch: Batch) -> LossSum:
        """The loss of the rows of a batch.

        Evaluation calls it too, without `training`, and reports `total` as nats per byte: it should be the negative
        log-likelihood, and what only helps training belongs into `add_loss`.

        Args:
            batch: what the trainer's input yields, each [batch, ...].

        Returns:
            Scalars: the sum of the loss, and the count, which depends on the batch alone, not on the parameters.
        """
        raise NotImplementedError

    def value(self, fn: Functional, params: Tree, state: Tree, batch: Batch, **options: Any) -> jax.Array:
        """What a training step of one microbatch minimizes, a float32 scalar; `options` are those of `invoke`."""
        (loss, collections), _ = fn(params, state, batch, method=self, **options)
        return loss.mean() + collections.total_loss()


class CrossEntropy(Objective):
    """The mean cross-entropy of the targets that count, in nats. It adds `z_loss`, `label_smoothing`, and the
    cross-entropy of each token further ahead that the model predicts, as `future.0` and so on.

    A model offers `predictions(batch)` and `logits(hidden)`, as `CausalLM` does.
    """

    class Config(Objective.Config):
        z_loss: float = 0.0
        """Weight of the mean squared log-partition (PaLM, arXiv 2204.02311, section 5); 0 leaves it out."""
        label_smoothing: float = 0.0
        """The share of each target that is spread evenly over the vocabulary (Szegedy et al. 2015, arXiv 1512.00567,
        section 7). `label_smoothing` in the metrics is what this adds to the cross-entropy."""
        chunk: int | None = None
        """Places of each row whose logits exist at once; the backward pass makes them again. None: all."""

    config: Config

    def __init__(self, cfg: Config):
        if cfg.chunk is not None and cfg.chunk < 1:
            raise config.ConfigError(f"objective.chunk must be at least 1 or None, not {cfg.chunk}")
        if not cfg.z_loss >= 0:
            raise config.ConfigError(f"objective.z_loss must be at least 0, not {cfg.z_loss}")
        if not 0 <= cfg.label_smoothing < 1:
            raise config.ConfigError(
                f"objective.label_smoothing must be at least 0 and below 1, not {cfg.label_smoothing}"
            )
        super().__init__(cfg)

    def __call__(self, model: Any, batch: Batch) -> LossSum:
        cfg, frame = self.config, current()
        if not hasattr(model, "predictions"):
            raise config.ConfigError(
                f"objective: CrossEntropy needs a model with predictions(batch) and logits(hidden), as CausalLM has, "
                f"not a {type(model).__name__}; choose another objective"
            )
        main, *further = model.predictions(batch)
        losses, log_z, spread = self._scores(model, main)
        count = main.weights.astype(jnp.float32).sum()
        if cfg.z_loss:
            frame.add_loss("z_loss", _weighted(jnp.square(log_z), main.weights), count, cfg.z_loss)
        if spread is not None:
            added = _weighted(spread - losses, main.weights)
            frame.add_loss("label_smoothing", added, count, cfg.label_smoothing)
        for other in further:
            total = _weighted(self._scores(model, other)[0], other.weights)
            frame.add_loss(other.name, total, other.weights.sum(), other.loss_weight)
        return LossSum(_weighted(losses, main.weights), count)

    def _scores(self, model: Any, prediction: Prediction) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """float32 [batch, seq]: the cross-entropy of each target, the log-partition and, where labels are smoothed, the
        mean cross-entropy of all tokens of the vocabulary."""
        smooth, seq = bool(self.config.label_smoothing), prediction.hidden.shape[1]
        chunk = min(self.config.chunk or seq, seq)

        def scores(model: Any, hidden: jax.Array, targets: jax.Array) -> Any:
            logits = model.logits(hidden)
            log_z = jax.nn.logsumexp(logits, axis=-1)
            picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
            return log_z - picked, log_z, log_z - _mean_logit(logits) if smooth else None

        score = scores if chunk == seq else in_pieces(scores, chunk)
        found: tuple[jax.Array, jax.Array, jax.Array | None] = score(model, prediction.hidden, prediction.targets)
        return found


def _mean_logit(logits: jax.Array) -> jax.Array:
    """The mean over the vocabulary, its padding left out."""
    real = logits > MASKED_LOGIT / 2
    return jnp.where(real, logits, 0.0).sum(axis=-1) / real.sum(axis=-1)


def _weighted(losses: jax.Array, weights: jax.Array) -> jax.Array:
    """The weighted sum of the losses that count."""
    # A target that does not count may be any number (-1 or -100 by custom), and its loss means nothing.
    return jnp.where(weights == 0, 0.0, losses * weights).sum()
