"""The rule for AWS Trainium. It was not run on Trainium."""

from __future__ import annotations

import jax.numpy as jnp

from axcore.config import has_field, walk
from axcore.nn import use_remat
from axcore.parallel import ByTag
from axcore.plugin import Accelerator
from axcore.train import Trainer
from axcore_mesh_rules.kernels import with_kernel

NKI_DTYPES = (jnp.bfloat16,)
"""The dtypes that NKI attention supports."""


def trainium(cfg: Trainer.Config, accelerator: Accelerator) -> Trainer.Config:
    """FSDP over the cores of a host, which are connected by NeuronLink, and data parallelism over hosts. The size of
    fsdp is -1, because each chip has several devices. From Trainium2 on, attention layers of `NKI_DTYPES` without an
    explicit kernel get NKI attention.

    Raises:
        ConfigError: no installed plugin offers NKI attention.
    """
    cfg = cfg.set(mesh=cfg.mesh.set(shape={"data": accelerator.hosts, "fsdp": -1}))
    if any(has_field(node, "remat") for _, node in walk(cfg.model)):
        cfg = cfg.set(model=use_remat(cfg.model, ByTag(save=("heads", "lse"))))
    return cfg if accelerator.kind == "trn1" else with_kernel(cfg, ("nki",), NKI_DTYPES)
