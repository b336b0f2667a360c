"""Mesh rules: the layout of a recipe on the accelerator given to `axcore.target`."""

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
"""TPUs with at most 32 GB per device."""

HALF = (jnp.bfloat16, jnp.float16)
"""The dtypes that cuDNN attention supports."""


def hybrid(cfg: Trainer.Config, accelerator: Accelerator) -> Trainer.Config:
    """Shards over the devices of a host (or of a TPU slice) and replicates over hosts.

    Parameters are gathered only over the fast interconnect, and only gradients cross the slower network.
    """
    return cfg.set(mesh=cfg.mesh.set(shape={"data": accelerator.hosts, "fsdp": accelerator.per_host}))


def h100(cfg: Trainer.Config, accelerator: Accelerator) -> Trainer.Config:
    """Like `hybrid`, with the cuDNN kernel in attention layers without an explicit kernel.

    Attention layers that compute in float32 keep the reference kernel, since no fused kernel supports float32.

    Raises:
        ConfigError: no installed plugin offers the cuDNN kernel.
    """
    cfg = hybrid(cfg, accelerator)

    def wants_cudnn(path: str, node: Config) -> bool:
        is_plain = has_field(node, "kernel") and getattr(node, "kernel", None) == ReferenceKernel.Config()
        return is_plain and _compute_dtype(cfg, path) in HALF

    path = next((path for path, node in walk(cfg) if wants_cudnn(path, node)), None)
    if path is None:
        return cfg
    if registry.find(AttentionKernelOffer, "cudnn") is None:
        raise ConfigError(
            f"{path}.kernel: the mesh rule for H100s requires the kernel 'cudnn', which no installed plugin offers. "
            f"Install axcore-cudnn, or allow the slower reference kernel: --use kernels:order=(reference,) before "
            f"--target"
        )
    return ax.pipe(cfg, ax.use("kernels", order=("cudnn",), where=wants_cudnn))


def _compute_dtype(cfg: Config, path: str) -> Any:
    """The compute dtype of the layer at this path: its own, or that of the nearest ancestor."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        dtypes = getattr(get(cfg, ".".join(parts[:count])), "dtypes", None)
        if dtypes is not None and dtypes.compute is not None:
            return dtypes.compute
    return DEFAULT_DTYPES.compute


def tpu(cfg: Trainer.Config, accelerator: Accelerator) -> Trainer.Config:
    """Like `hybrid`. On devices with little memory, remat keeps only the inputs of layers."""
    cfg = hybrid(cfg, accelerator)
    has_stack = any(isinstance(node, Stack.Config) for _, node in walk(cfg))
    return use_remat(cfg, Remat()) if has_stack and accelerator.kind in SMALL_MEMORY else cfg
