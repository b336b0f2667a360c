"""Mesh rules: how a recipe lies on the hardware that `axcore.target` names."""

from __future__ import annotations

import axcore as ax
from axcore.config import Config, has_field, walk
from axcore.nn import ReferenceKernel, Stack, use_remat
from axcore.parallel import Remat
from axcore.plugin import Accelerator, AttentionKernel, registry
from axcore.train import Trainer

SMALL_MEMORY = {"v2", "v3", "v5e", "v6e"}
"""TPUs with 32 GB or less for each device."""


def hybrid(cfg: Trainer.Config, accelerator: Accelerator) -> Trainer.Config:
    """Shards over the devices of a host (or of a TPU slice), and repeats that over the hosts.

    So the gathering of parameters stays where devices are joined closely, and only gradients cross the slower network.
    """
    return cfg.set(mesh=cfg.mesh.set(shape={"data": accelerator.hosts, "fsdp": accelerator.per_host}))


def h100(cfg: Trainer.Config, accelerator: Accelerator) -> Trainer.Config:
    """As `hybrid`; attentions that nobody gave a kernel try cuDNN's, where that plugin is installed."""
    cfg = hybrid(cfg, accelerator)

    def has_plain_kernel(_: str, node: Config) -> bool:
        return has_field(node, "kernel") and getattr(node, "kernel", None) == ReferenceKernel.Config()

    if registry().find(AttentionKernel, "cudnn") is None or not any(has_plain_kernel(*each) for each in walk(cfg)):
        return cfg
    return ax.pipe(cfg, ax.use("kernels", order=("cudnn", "reference"), where=has_plain_kernel))


def tpu(cfg: Trainer.Config, accelerator: Accelerator) -> Trainer.Config:
    """As `hybrid`; where memory is small, stacks keep nothing but the inputs of their layers."""
    cfg = hybrid(cfg, accelerator)
    has_stack = any(isinstance(node, Stack.Config) for _, node in walk(cfg))
    return use_remat(cfg, Remat()) if has_stack and accelerator.kind in SMALL_MEMORY else cfg
