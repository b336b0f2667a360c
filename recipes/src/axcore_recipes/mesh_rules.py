"""Mesh rules: how a recipe lies on the hardware that `axcore.target` names."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import axcore as ax
from axcore.config import Config, ConfigError, has_field, walk
from axcore.config.tree import get
from axcore.module.layer import DEFAULT_DTYPES
from axcore.nn import ReferenceKernel, Stack, use_remat
from axcore.parallel import Remat
from axcore.plugin import Accelerator, AttentionKernelOffer, registry
from axcore.train import Trainer

SMALL_MEMORY = {"v2", "v3", "v5e", "v6e"}
"""TPUs with 32 GB or less for each device."""

HALF = (jnp.bfloat16, jnp.float16)
"""What cuDNN attends in."""


def hybrid(cfg: Trainer.Config, accelerator: Accelerator) -> Trainer.Config:
    """Shards over the devices of a host (or of a TPU slice), and repeats that over the hosts.

    So the gathering of parameters stays where devices are joined closely, and only gradients cross the slower network.
    """
    return cfg.set(mesh=cfg.mesh.set(shape={"data": accelerator.hosts, "fsdp": accelerator.per_host}))


def h100(cfg: Trainer.Config, accelerator: Accelerator) -> Trainer.Config:
    """As `hybrid`; attentions without a kernel of their own attend with cuDNN's.

    Those that compute in float32 keep the reference kernel: no fused kernel does that.

    Raises:
        ConfigError: no installed plugin offers the kernel.
    """
    cfg = hybrid(cfg, accelerator)

    def wants_cudnn(path: str, node: Config) -> bool:
        is_plain = has_field(node, "kernel") and getattr(node, "kernel", None) == ReferenceKernel.Config()
        return is_plain and _compute_dtype(cfg, path) in HALF

    path = next((path for path, node in walk(cfg) if wants_cudnn(path, node)), None)
    if path is None:
        return cfg
    if registry().find(AttentionKernelOffer, "cudnn") is None:
        raise ConfigError(
            f"{path}.kernel: H100s attend with cuDNN, and no installed plugin offers the kernel 'cudnn'. Install "
            f"axcore-cudnn, or allow the slower reference kernel: --use kernels:order=(reference,) before --target"
        )
    return ax.pipe(cfg, ax.use("kernels", order=("cudnn",), where=wants_cudnn))


def _compute_dtype(cfg: Config, path: str) -> Any:
    """The dtype that the layer at this path computes in: its own, or that of the nearest layer above it."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        dtypes = getattr(get(cfg, ".".join(parts[:count])), "dtypes", None)
        if dtypes is not None and dtypes.compute is not None:
            return dtypes.compute
    return DEFAULT_DTYPES.compute


def tpu(cfg: Trainer.Config, accelerator: Accelerator) -> Trainer.Config:
    """As `hybrid`; where memory is small, stacks keep nothing but the inputs of their layers."""
    cfg = hybrid(cfg, accelerator)
    has_stack = any(isinstance(node, Stack.Config) for _, node in walk(cfg))
    return use_remat(cfg, Remat()) if has_stack and accelerator.kind in SMALL_MEMORY else cfg
