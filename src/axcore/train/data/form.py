"""The shapes of a batch, without reading data."""

from __future__ import annotations

import jax

from axcore.train.data.base import Input


def batch_form(cfg: Input.Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of a global batch, by name."""
    return {name: jax.ShapeDtypeStruct(*each) for name, each in cfg.target.batch_spec(cfg).items()}
