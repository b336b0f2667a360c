"""The log-probabilities of an engine beside those of the training loss, which must agree to train on samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from axcore.infer.engine import Engine
from axcore.infer.requests import Request, SamplingOptions, TokenLogprob
from axcore.module import Layer, Tree, functional
from axcore.train import CrossEntropy


class LogprobErrors(NamedTuple):
    """Log-probabilities of an engine minus those of the training loss, one for each token of all rows.

    Attributes:
        output: of sampled tokens, as `SamplingOptions.logprobs` returns them.
        prompt: of the prompts, as `SamplingOptions.prompt_logprobs` returns them.
        scored: of prompts with their outputs, as `Engine.score` returns them.
    """

    output: Float[np.ndarray, " tokens"]
    prompt: Float[np.ndarray, " tokens"]
    scored: Float[np.ndarray, " tokens"]

    @property
    def largest(self) -> float:
        """The largest absolute error; NaN if a log-probability is not finite."""
        return float(np.abs(np.concatenate(self)).max())


def training_logprobs(model: Layer, rows: Sequence[Sequence[int]]) -> list[Float[np.ndarray, " tokens"]]:
    """The log-probability of each token of some rows but the first, as the training loss computes it.

    It runs `axcore.train.CrossEntropy` on each whole row, without dropout. Rows of different lengths are compiled
    separately.

    Args:
        model: a model with the methods that `CrossEntropy` requires, such as `axcore.nn.CausalLM`.
        rows: the token ids of each row.

    Returns:
        The float32 log-probabilities of each row, one fewer than its tokens.
    """
    fn, params, state = functional(model)
    loss = CrossEntropy.Config().build()

    @jax.jit
    @jax.grad  # the derivative of the total loss in the weight of a token is the loss of this token
    def losses(weights: jax.Array, params: Tree, state: Tree, ids: jax.Array) -> jax.Array:
        batch = {"inputs": ids[None, :-1], "targets": ids[None, 1:], "weights": weights[None]}
        (found, _), _ = fn(params, state, batch, method=loss)
        total: jax.Array = found.total
        return total

    return [-np.asarray(losses(jnp.ones((len(row) - 1,)), params, state, np.asarray(row))) for row in rows]


def logprob_errors(
    engine: Engine, model: Layer, prompts: Iterable[Sequence[int]], options: SamplingOptions
) -> LogprobErrors:
    """Samples and scores with an engine, and compares each log-probability with that of the training loss.

    ```python
    with Engine.Config(max_len=64).build(model) as engine:
        errors = logprob_errors(engine, model, [(1, 2, 3)], SamplingOptions(max_tokens=16))
        assert errors.largest <= 1e-5
    ```

    Args:
        engine: an engine of the model.
        model: the model, as it is trained.
        prompts: the token ids of each prompt.
        options: how outputs are sampled. `logprobs` and `prompt_logprobs` are set by this function.

    Raises:
        AxcoreError: a request does not fit, or the engine failed.
    """
    options = dataclasses.replace(options, logprobs=0, prompt_logprobs=True)
    asked = [Request(tuple(map(int, ids)), options) for ids in prompts]
    found = engine.generate(asked)
    rows = [(*request.ids, *piece.ids) for request, piece in zip(asked, found, strict=True)]
    expected = training_logprobs(model, rows)
    scores = engine.score(row for row in rows if len(row) < engine.max_len)
    fit = [each for row, each in zip(rows, expected, strict=True) if len(row) < engine.max_len]
    starts = [len(request.ids) - 1 for request in asked]

    def errors(tokens: Iterable[Sequence[TokenLogprob] | None], wanted: Iterable[np.ndarray]) -> np.ndarray:
        pairs = zip(tokens, wanted, strict=True)
        parts = [np.asarray([each.logprob for each in got or ()], np.float64) - want for got, want in pairs]
        return np.concatenate([np.zeros(0), *parts])

    return LogprobErrors(
        output=errors((p.logprobs for p in found), (e[s:] for e, s in zip(expected, starts, strict=True))),
        prompt=errors((p.prompt_logprobs for p in found), (e[:s] for e, s in zip(expected, starts, strict=True))),
        scored=errors(scores, fit),
    )
