"""Adapters as initial weights of a run."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import axcore as ax
from axcore.config import AxcoreError, ConfigError, under
from axcore.nn import by_layer
from axcore.train import Initial, Trainer
from axcore.train.checkpoint.model_folder import Forms
from axcore_lora.adapter import Adapter
from axcore_lora.adapter_params import SLOT
from axcore_lora.attach import frozen
from axcore_lora.layered import attached, split, without_adapters


class FromAdapter(Initial):
    """The adapters in a folder, and the other weights from another source. Layers may be stacked differently."""

    class Config(Initial.Config):
        base: Initial.Config = ax.REQUIRED
        """The weights of the model without adapters."""
        folder: str = ax.REQUIRED
        """A folder that `Adapter.read` reads: a run folder, or one from `axcore adapter` or PEFT."""

    config: Config

    def load(self, model: Any, params: Forms, state: Forms) -> dict[str, jax.Array]:
        cfg = self.config
        wanted = {path: form for path, form in params.items() if f".{SLOT}." in path}
        with under("base"):
            others = {path: form for path, form in params.items() if path not in wanted}
            found = cfg.base.build().load(model, others, state)
        stored = {
            f"{layer}.{SLOT}.{name}": array
            for layer, each in split(Adapter.read(cfg.folder, model=without_adapters(model))).items()
            for name, array in each.arrays.items()
        }
        places = by_layer(model, wanted)
        shapes = {name: tuple(wanted[path].shape[len(index) :]) for name, (path, index) in places.items()}
        held = {name: tuple(array.shape) for name, array in stored.items()}
        if differing := [name for name in {**shapes, **held} if shapes.get(name) != held.get(name)]:
            name = differing[0]
            raise AxcoreError(
                f"initial.folder={cfg.folder!r}: {name} has the shape {held.get(name)} there and {shapes.get(name)} in "
                f"the model. Attach the adapters with use('lora-weights', folder=...)"
            )
        made = {path: np.zeros(form.shape, form.dtype) for path, form in wanted.items()}
        for name, (path, index) in places.items():
            made[path][index] = stored[name]
        return found | {path: jax.device_put(array, wanted[path].sharding) for path, array in made.items()}


def use_lora_weights(cfg: Trainer.Config, folder: str, freeze: bool = True) -> Trainer.Config:
    """Continues the training of adapters: attaches those in a folder, with their ranks, and starts from their values.

    The other weights are those that the config starts from, as set by `hf-weights` or `run-weights`.

    Args:
        folder: a folder a run folder, or one from `axcore adapter` or PEFT.
        freeze: train only adapters; see `use_lora`.

    Raises:
        ConfigError: the config starts from no weights or has adapters already, or the adapters do not fit the model.
        AxcoreError: the folder has no adapter, or one that is not supported.
    """
    if not isinstance(cfg, Trainer.Config):
        raise ConfigError(f"lora-weights requires a trainer's config, not {type(cfg).__qualname__}")
    if cfg.initial is None:
        raise ConfigError(
            "lora-weights: initial is None, but adapters belong to the weights of a model. Attach these first, for "
            "example with use('run-weights', folder=...)"
        )
    found = split(Adapter.read(folder, model=cfg.model))
    model = attached(cfg.model, {name: each.cfg for name, each in found.items()})
    initial = FromAdapter.Config(base=cfg.initial, folder=folder, allow_new=cfg.initial.allow_new)
    cfg = cfg.set(model=model, initial=initial)
    return frozen(cfg) if freeze else cfg
