"""Objectives: training losses as totals and counts, which can be added over microbatches and devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from axcore import config
from axcore.module import Functional, LossSum, Tree, current
from axcore.nn import MASKED_LOGIT, Prediction
from axcore.nn.pieces import in_pieces

Batch = Mapping[str, jax.Array]
Scores = tuple[Float[Array, "batch seq"], Float[Array, "batch seq"], Float[Array, "batch seq"] | None]


class Objective(config.Configurable):
    """Base class of objectives, which compute the training loss of a model on a batch.

    An objective runs in the frame of the model: it may call the model's methods, and use `axcore.current()` to add
    losses (`add_loss`), report summaries and draw random numbers. The training step minimizes `total / count` of the
    result plus the losses that the objective and the layers add. Totals and counts are summed over all microbatches and
    devices of the batch.
    """

    class Config(config.Config):
        """Fields of the objective."""

    config: Config

    def __init__(self, cfg: Config):
        self.config = cfg

    def __call__(self, model: Any, batch: Batch) -> LossSum:
        """The loss of a batch.

        Evaluation also calls this method, with `training=False`. It reports `total` divided by `count` (nats per token)
        and by the number of bytes (bits per byte). The total should therefore be the negative log-likelihood. Add
        terms that only help training with `add_loss`.

        Args:
            model: the model.
            batch: arrays [batch, ...] that the input yields.

        Returns:
            The total of the loss and its count. The count must not depend on parameters.
        """
        raise NotImplementedError

    def value(
        self,
        fn: Functional,
        params: Tree,
        state: Tree,
        batch: Batch,
        *,
        key: jax.Array | None = None,
        training: bool = False,
    ) -> Float[Array, ""]:
        """The float32 loss that a training step without microbatches minimizes. `key` and `training` are those of
        `axcore.invoke`."""
        (loss, collections), _ = fn(params, state, batch, method=self, key=key, training=training)
        return loss.mean() + collections.total_loss()


class LanguageModel(Protocol):
    """A model that `CrossEntropy` can score."""

    def predictions(self, batch: Batch) -> tuple[Prediction, ...]:
        """The predictions to score: first the next token, then further tokens."""

    def logits(self, hidden: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq padded_vocab"]:
        """The logits of the `hidden` states of a prediction."""


class CrossEntropy(Objective):
    """The weighted mean cross-entropy of the targets, in nats.

    It adds the losses `z_loss` and `label_smoothing`. For multi-token prediction it adds the cross-entropy of each
    token beyond the next one, as `future.0` and so on. The model must have the methods `predictions(batch)` and
    `logits(hidden)`, like `CausalLM`.
    """

    class Config(Objective.Config):
        layout_fields = ("chunk",)
        z_loss: config.NonNegativeFloat = 0.0
        """Weight of the mean squared log-partition (PaLM, arXiv 2204.02311, section 5). 0 adds no loss."""
        label_smoothing: config.Fraction = 0.0
        """The fraction of the probability of each target that is spread evenly over the vocabulary (Szegedy et al.
        2015, arXiv 1512.00567, section 7). The metric `label_smoothing` is the resulting increase of the
        cross-entropy."""
        chunk: config.PositiveInt | None = None
        """Number of tokens of each row whose logits are in memory at once. The backward pass recomputes them.
        None: all."""

    config: Config

    def __call__(self, model: LanguageModel, batch: Batch) -> LossSum:
        cfg, frame = self.config, current()
        if not hasattr(model, "predictions"):
            raise config.ConfigError(
                f"objective: CrossEntropy requires a model with predictions(batch) and logits(hidden), such as "
                f"CausalLM, got {type(model).__name__}; choose another objective"
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

    def _scores(self, model: LanguageModel, prediction: Prediction) -> Scores:
        """The cross-entropy of each target, the log-partition and, if labels are smoothed, the mean cross-entropy over
        the vocabulary, all float32."""
        for name in ("targets", "weights"):
            if getattr(prediction, name).shape != prediction.hidden.shape[:2]:
                raise config.ConfigError(
                    f"objective: the batch's {name} have the shape {getattr(prediction, name).shape}, "
                    f"expected {prediction.hidden.shape[:2]}"
                )
        smooth, seq = bool(self.config.label_smoothing), prediction.hidden.shape[1]
        chunk = min(self.config.chunk or seq, seq)

        def scores(model: LanguageModel, hidden: jax.Array, targets: jax.Array) -> Scores:
            logits = model.logits(hidden)
            log_z = jax.nn.logsumexp(logits, axis=-1)
            is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
            picked = jnp.where(is_target, logits, 0.0).sum(axis=-1)  # unlike a gather, it keeps the vocabulary sharded
            known = (targets >= 0) & (targets < logits.shape[-1])
            picked = jnp.where(known, picked, jnp.nan)
            return log_z - picked, log_z, log_z - _mean_logit(logits) if smooth else None

        score = scores if chunk == seq else in_pieces(scores, chunk)
        found: Scores = score(model, prediction.hidden, prediction.targets)
        return found


def _mean_logit(logits: jax.Array) -> jax.Array:
    """The mean over the vocabulary without padding."""
    real = logits > MASKED_LOGIT / 2
    return jnp.where(real, logits, 0.0).sum(axis=-1) / real.sum(axis=-1)


def _weighted(losses: jax.Array, weights: jax.Array) -> jax.Array:
    """The weighted sum of the losses."""
    # A target of weight 0 may be any number, such as -100, and its loss may be infinite.
    return jnp.where(weights == 0, 0.0, losses * weights).sum()
