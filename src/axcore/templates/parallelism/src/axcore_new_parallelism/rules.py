"""The layout for hosts whose GPUs have a fast interconnect."""

from __future__ import annotations

import axcore as ax
from axcore.plugin import Accelerator
from axcore.train import Trainer

RULES: dict[str, str | tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
    "head": "tensor",
    "kv_head": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}
"""Logical axis -> mesh axes. Attention heads, hidden features of feed-forward blocks and the vocabulary are sharded
over the tensor axis (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Parameters are also sharded over fsdp."""


def pairs(cfg: Trainer.Config, accelerator: Accelerator) -> Trainer.Config:
    """Tensor parallelism over two GPUs, FSDP over the rest of the host, data parallelism over hosts.

    Raises:
        ConfigError: a host has an odd number of GPUs.
    """
    if accelerator.per_host % 2:
        raise ax.ConfigError(f"pairs require an even number of GPUs per host, got {accelerator.per_host}")
    shape = {"data": accelerator.hosts, "fsdp": accelerator.per_host // 2, "tensor": 2}
    return cfg.set(mesh=ax.Mesh(shape=shape, rules=RULES))
