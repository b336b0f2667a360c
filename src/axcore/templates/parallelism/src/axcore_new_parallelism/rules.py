"""The layout for hosts whose GPUs have a fast interconnect."""

from __future__ import annotations

import axcore as ax
from axcore.plugin import Accelerator
from axcore.train import Trainer


def pairs(cfg: Trainer.Config, accelerator: Accelerator) -> Trainer.Config:
    """Tensor parallelism over two GPUs (Shoeybi et al. 2019, arXiv 1909.08053, section 3), FSDP over the rest of the
    host, data parallelism over hosts. The mesh keeps the standard rules from logical axes to these mesh axes.

    Raises:
        ConfigError: a host has an odd number of GPUs.
    """
    if accelerator.per_host % 2:
        raise ax.ConfigError(f"pairs require an even number of GPUs per host, got {accelerator.per_host}")
    shape = {"data": accelerator.hosts, "fsdp": accelerator.per_host // 2, "tensor": 2}
    return cfg.set(mesh=cfg.mesh.set(shape=shape))
