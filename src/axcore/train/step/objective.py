"""Objectives: training losses as totals and counts, which can be added over microbatches and devices."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from axcore import config
from axcore.module import Functional, LossSum, Tree, current
from axcore.nn import MASKED_LOGIT, Prediction
from axcore.train.step.chunks import chunked_sum

Batch = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]
"""The weighted sums over the tokens of `loss` and, if the config asks for them, `z_loss` and `label_smoothing`."""


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
        """Number of tokens of each device whose logits are in memory at once, such as 4096. The forward pass computes
        the gradients of each chunk, so nothing is computed twice. None: all."""

    config: Config

    def __call__(self, model: LanguageModel, batch: Batch) -> LossSum:
        cfg, frame = self.config, current()
        if not hasattr(model, "predictions"):
            raise config.ConfigError(
                f"objective: CrossEntropy requires a model with predictions(batch) and logits(hidden), such as "
                f"CausalLM, got {type(model).__name__}; choose another objective"
            )
        main, *further = model.predictions(batch)
        factors = {"z_loss": cfg.z_loss, "label_smoothing": cfg.label_smoothing}
        factors = {name: factor for name, factor in factors.items() if factor}
        sums, count = self._sums(model, main, factors), main.weights.astype(jnp.float32).sum()
        for name, factor in factors.items():
            frame.add_loss(name, sums[name], count, factor)
        for other in further:
            total = self._sums(model, other, {})["loss"]
            frame.add_loss(other.name, total, other.weights.sum(), other.loss_weight)
        return LossSum(sums["loss"], count)

    def _sums(self, model: LanguageModel, prediction: Prediction, factors: Mapping[str, float]) -> Sums:
        """The float32 sums of a prediction. In chunks, the gradient of `loss` is that of the loss and `factors` times
        the other sums."""
        hidden, targets, weights = prediction.hidden, prediction.targets, prediction.weights
        for name in ("targets", "weights"):
            if getattr(prediction, name).shape != hidden.shape[:2]:
                raise config.ConfigError(
                    f"objective: the batch's {name} have the shape {getattr(prediction, name).shape}, "
                    f"expected {hidden.shape[:2]}"
                )

        def sums(model: LanguageModel, hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> Sums:
            return _sums(model.logits(hidden), targets, weights, factors)

        def minimized(model: LanguageModel, *args: jax.Array) -> tuple[jax.Array, Sums]:
            found = sums(model, *args)
            return found["loss"] + sum(factor * found[name] for name, factor in factors.items()), found

        if self.config.chunk is None:
            return sums(model, hidden, targets, weights)
        count = weights.astype(jnp.float32).sum()
        expected = jax.lax.stop_gradient((prediction.loss_weight or 1.0) / jnp.where(count == 0, 1.0, count))
        total, found = chunked_sum(minimized, self.config.chunk)(model, expected, hidden, targets, weights)
        found = jax.lax.stop_gradient(found)
        return {**found, "loss": found["loss"] + (total - jax.lax.stop_gradient(total))}


def _sums(logits: jax.Array, targets: jax.Array, weights: jax.Array, names: Container[str]) -> Sums:
    log_z = _log_partition(logits)
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    picked = jnp.where(is_target, logits, 0.0).sum(axis=-1)  # unlike a gather, it keeps the vocabulary sharded
    known = (targets >= 0) & (targets < logits.shape[-1])
    losses = log_z - jnp.where(known, picked, jnp.nan)
    sums = {"loss": _weighted(losses, weights)}
    if "z_loss" in names:
        sums["z_loss"] = _weighted(jnp.square(log_z), weights)
    if "label_smoothing" in names:
        sums["label_smoothing"] = _weighted(log_z - _mean_logit(logits) - losses, weights)
    return sums


@jax.custom_jvp
def _log_partition(logits: jax.Array) -> jax.Array:
    """`logsumexp` over the vocabulary. Its derivative recomputes the probabilities from the logits, which saves an
    array of the size of the logits."""
    return jax.nn.logsumexp(logits, axis=-1)


@_log_partition.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (logits,), (tangent,) = primals, tangents
    log_z = _log_partition(logits)
    return log_z, (jnp.exp(logits - log_z[..., None]) * tangent).sum(axis=-1)


def _mean_logit(logits: jax.Array) -> jax.Array:
    """The mean over the vocabulary without padding."""
    real = logits > MASKED_LOGIT / 2
    return jnp.where(real, logits, 0.0).sum(axis=-1) / real.sum(axis=-1)


def _weighted(losses: jax.Array, weights: jax.Array) -> jax.Array:
    """The weighted sum of the losses."""
    # A target of weight 0 may be any number, such as -100, and its loss may be infinite.
    return jnp.where(weights == 0, 0.0, losses * weights).sum()
