"""The check that an engine gives the log-probabilities of training."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from axcore.infer import Engine, SamplingOptions
from axcore.infer.logprobs import logprob_errors, training_logprobs
from axcore.module import Layer


def check_logprobs(
    model: Layer,
    cfg: Engine.Config,
    *,
    trained: Layer | None = None,
    bound: float = 1e-5,
    lengths: Iterable[int] = (21, 8),
    max_tokens: int = 6,
) -> float:
    """Checks the log-probabilities of an engine against those of the training loss: of sampled tokens, of prompts, and
    of `Engine.score`.

    ```python
    cfg = Engine.Config(max_len=32, max_rows=2, step_tokens=16, cache=PagedCache.Config(page_size=4))
    check_logprobs(tiny_model().build(rngs=ax.Rngs(0)), cfg)
    ```

    Args:
        model: the model of the engine.
        cfg: the engine.
        trained: the model whose loss is compared, such as one with another kernel; None: `model`.
        bound: the largest absolute error.
        lengths: the lengths of the prompts, which have random tokens.
        max_tokens: the number of tokens that are sampled after each prompt.

    Returns:
        The largest absolute error.
    """
    random, trained = np.random.default_rng(0), trained or model
    with cfg.build(model) as engine:
        prompts = [random.integers(0, engine.vocab_size, length).tolist() for length in lengths]
        options = SamplingOptions(max_tokens=max_tokens, seed=0)
        errors = logprob_errors(engine, trained, prompts, options)
    for name, each in errors._asdict().items():
        assert each.size, f"no log-probabilities: {name}"
        largest = np.abs(each).max()
        assert largest <= bound, f"{name}: the largest error of the log-probabilities is {largest:.3g}, above {bound:g}"
    _check_sensitive(training_logprobs(trained, prompts[:1])[0], bound)
    return errors.largest


def _check_sensitive(logprobs: np.ndarray, bound: float) -> None:
    """Checks that the log-probabilities of random tokens differ. A model whose logits are all alike hides errors."""
    spread = float(logprobs.std())
    assert spread > 2 * bound, f"the log-probabilities of the model differ by {spread:.3g} only; use larger weights"
