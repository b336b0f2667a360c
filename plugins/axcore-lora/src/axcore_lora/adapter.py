"""The adapters of a model apart from its weights, in memory and in a folder."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import axcore as ax
from axcore.config import AxcoreError
from axcore.module import Tree, abstract
from axcore.train import ModelFolder, save_model
from axcore.train.checkpoint.model_folder import flat, like
from axcore_lora.adapter_params import adapters


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """The LoRA or DoRA adapters of all layers of a model.

    Attributes:
        cfg: the config of the model with its adapters.
        params: their parameters, as `adapters` returns them.
    """

    cfg: Any  # Any: the config of a model
    params: Tree

    @classmethod
    def read(cls, folder: str | pathlib.Path, *, step: int | None = None, model: Any = None) -> Adapter:
        """Reads the adapters of a run, of a model folder, of a folder that `save` wrote, or of one that PEFT wrote, and
        no other weights.

        Args:
            folder: the folder.
            step: step of the checkpoint; None: the newest.
            model: config of the model that a PEFT adapter belongs to, without adapters. The others have their own.

        Raises:
            AxcoreError: the folder is none of these, its model has no adapters, or a PEFT adapter is not supported
                or does not fit `model`.
        """
        from axcore_lora import peft

        if peft.is_peft(folder):
            if step is not None:
                raise AxcoreError(f"{folder}: a PEFT adapter has no checkpoints. Omit step={step}")
            if model is None:
                raise AxcoreError(
                    f"{folder}: a PEFT adapter has no config of its model. Give that of the base model (model=, or "
                    f"`axcore adapter --base`)"
                )
            return peft.read(folder, model)
        found = ModelFolder.open(folder)
        wanted = adapters(abstract(found.model)[1])
        if not wanted:
            raise AxcoreError(
                f"the model in {found.folder} has no adapters. Give the folder of a run with use('lora'), or one from "
                f"`axcore adapter`"
            )
        arrays, missing, _ = found.load(found.model, flat(wanted), {}, step=step)
        if missing:
            raise AxcoreError(f"{found.folder} lacks adapters of its model: {', '.join(missing[:8])}")
        return cls(found.model, like(wanted, arrays))

    def save(self, folder: str | pathlib.Path) -> pathlib.Path:
        """Writes a folder with the adapters and the config of the model, without other weights.

        Raises:
            AxcoreError: the folder exists or cannot be written.
        """
        return save_model(folder, self.cfg, self.params)

    def save_peft(self, folder: str | pathlib.Path) -> pathlib.Path:
        """Writes LoRA adapters in the PEFT format.

        Raises:
            AxcoreError: an adapter is DoRA or one of experts, the model is not of a published family, or the folder
                exists or cannot be written.
        """
        from axcore_lora import peft

        return peft.write(self, folder)

    @classmethod
    def of(cls, cfg: ax.Config, params: Tree) -> Adapter:
        """The adapters among the parameters of a model.

        Args:
            cfg: the config of the model.
            params: its parameters.
        """
        return cls(cfg, adapters(params))
