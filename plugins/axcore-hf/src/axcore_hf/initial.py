"""Published weights as initial weights of a run."""

from __future__ import annotations

import jax

from axcore import config
from axcore.train import Initial
from axcore_hf import importing
from axcore_hf.checkpoint import Checkpoint
from axcore_hf.importing import Forms

Model = config.Config


class FromHF(Initial):
    """The weights of a `transformers` checkpoint or of a GGUF file.

    The model may differ from the published one in parts without weights and in the stacking of its layers.
    """

    class Config(Initial.Config):
        source: str
        """`hf:DIR`, `gguf:FILE`, or `gguf:package:NAME` for a file that a Python package ships."""

    config: Config

    def load(self, model: Model, params: Forms, state: Forms) -> dict[str, jax.Array]:
        found = Checkpoint.open(self.config.source)
        return importing.load(found.family, found.model, found.source, model, params, state, self.config.allow_new)
