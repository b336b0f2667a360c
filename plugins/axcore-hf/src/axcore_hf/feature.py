"""The feature `hf-weights`."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import axcore as ax
from axcore.train import Trainer
from axcore_hf.initial import FromHF
from axcore_hf.tokenizer import FILE, HFTokenizer


def use_hf_weights(
    cfg: Trainer.Config, source: str, allow_new: tuple[str, ...] = (), eos_ids: tuple[int, ...] = ()
) -> Trainer.Config:
    """Starts from published weights and uses their tokenizer.

    Args:
        source: `hf:DIR`, `gguf:FILE` or `gguf:package:NAME`.
        allow_new: globs of parameters that may be missing and are then newly initialized.
        eos_ids: ids that end a text.
    """
    if not isinstance(cfg, Trainer.Config):
        raise ax.ConfigError(f"hf-weights requires a trainer's config, not {type(cfg).__qualname__}")
    tokenizer: Any = PublishedTokenizer.Config(source=source, eos_ids=eos_ids)
    cfg = cfg.set(initial=FromHF.Config(source=source, allow_new=allow_new))
    return ax.select(cfg, "input").set(tokenizer=tokenizer)


class PublishedTokenizer(HFTokenizer):
    """The tokenizer of a checkpoint."""

    class Config(HFTokenizer.Config):
        file: str = FILE
        source: str = ax.REQUIRED
        """The checkpoint, as in `FromHF`."""

        def __post_init__(self) -> None:
            if self.file != FILE:
                raise ax.ConfigError(
                    f"file={self.file!r} has no effect, since the tokenizer is that of the checkpoint {self.source!r}. "
                    f"To read a file, use HFTokenizer"
                )

        def inside(self, folder: pathlib.Path) -> PublishedTokenizer.Config:
            return self

        def packed(self) -> tuple[HFTokenizer.Config, dict[str, bytes]]:
            from axcore_hf.checkpoint import Checkpoint

            found = Checkpoint.open(self.source)
            if found.tokenizer is None:
                raise ax.AxcoreError(f"{self.source} has no tokenizer. Set input.tokenizer.")
            ends = self.eos_ids or found.tokenizer.eos_ids
            return HFTokenizer.Config(file=FILE, eos_ids=ends), dict(found.files)

    def __init__(self, cfg: Config):
        import tempfile

        packed, files = cfg.packed()
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                pathlib.Path(folder, name).write_bytes(content)
            super().__init__(packed.set(file=os.path.join(folder, FILE)))
