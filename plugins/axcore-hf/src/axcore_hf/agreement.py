"""Checks whether a published config describes a given model."""

from __future__ import annotations

from typing import Any

from axcore.config import AxcoreError, diff
from axcore.module import abstract
from axcore.nn import by_layer, layers_of
from axcore.train.checkpoint.model_folder import flat

MOST_SHOWN = 8
# Path components whose values do not change the output in evaluation.
WITHOUT_EFFECT = {"balance", "bias_init", "bias_rate", "cache", "dispatch", "dropout", "dtypes", "future"}
WITHOUT_EFFECT |= {"future_weight", "head_dim", "init", "jitter", "kernel", "num_kv_heads", "tags"}
WITHOUT_EFFECT |= {"starving_load", "starving_steps", "z_loss"}


def check_shapes(published: Any, model: Any, where: str) -> None:
    """Raises if a published config describes a model with other parameters.

    Raises:
        AxcoreError: lists the parameters that differ.
    """

    def shapes(cfg: Any) -> dict[str, tuple[int, ...]]:
        forms = flat(abstract(cfg)[1])
        names = by_layer(cfg, forms)
        return {name: tuple(forms[path].shape[len(index) :]) for name, (path, index) in names.items()}

    theirs, ours = shapes(published), shapes(model)
    lines = [
        f"{name}: {theirs.get(name, 'none')} in the config, {ours.get(name, 'none')} in the model"
        for name in theirs | ours
        if theirs.get(name) != ours.get(name)
    ]
    if lines:
        raise AxcoreError(f"{where} describes a different model:{listed(lines)}")


def differences(published: Any, model: Any) -> list[str]:
    """Options that differ, layer by layer, and may change the output of the model."""
    found: dict[str, None] = {}
    layers = zip(layers_of(published.decoder), layers_of(model.decoder), strict=True)
    pairs = [(f"decoder.{number}", theirs.config, ours.config) for number, (theirs, ours) in enumerate(layers)]
    for prefix, theirs, ours in [("", published, model.set(decoder=published.decoder)), *pairs]:
        for change in diff(theirs, ours):
            if WITHOUT_EFFECT.isdisjoint(change.path.split(".")):
                path = f"{prefix}.{change.path}".strip(".")
                found[f"{path}: {change.old} in the config, {change.new} in the model"] = None
    return list(found)


def listed(lines: list[str]) -> str:
    """The first lines and the number of the remaining ones."""
    more = f"\n  ... and {len(lines) - MOST_SHOWN} more" if len(lines) > MOST_SHOWN else ""
    return "".join(f"\n  {line}" for line in lines[:MOST_SHOWN]) + more
