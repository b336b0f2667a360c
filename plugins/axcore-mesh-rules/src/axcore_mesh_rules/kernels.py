"""Fused attention kernels for layers that have the default kernel."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import axcore as ax
from axcore.config import Config, ConfigError, has_field, walk
from axcore.config.tree import get
from axcore.module.layer import DEFAULT_DTYPES
from axcore.nn import ReferenceKernel
from axcore.plugin import AttentionKernelOffer, registry
from axcore.train import Trainer


def with_kernel(
    cfg: Trainer.Config, name: str, dtypes: Collection[Any], cached: tuple[str, ...] = ()
) -> Trainer.Config:
    """The config with a fused kernel in every attention that has the default kernel and computes in one of `dtypes`.

    Args:
        name: name of the kernel. The package `axcore-NAME` offers it, or the core.
        dtypes: the dtypes that the kernel supports. Attentions of other dtypes keep the default kernel.
        cached: names of the kernels for prefill and decoding; empty: the same kernel.

    Raises:
        ConfigError: no installed plugin offers one of the kernels.
    """

    def wants_kernel(path: str, node: Config) -> bool:
        is_plain = has_field(node, "kernel") and getattr(node, "kernel", None) == ReferenceKernel.Config()
        return is_plain and _compute_dtype(cfg, path) in dtypes

    path = next((path for path, node in walk(cfg) if wants_kernel(path, node)), None)
    if path is None:
        return cfg
    for each in (name, *cached):
        if registry.find(AttentionKernelOffer, each) is None:
            raise ConfigError(
                f"{path}.kernel: the mesh rule for this target requires the kernel {each!r}, which no installed "
                f"plugin offers. Install axcore-{each}, or allow the slower reference kernel: "
                f"--use kernels:order=(reference,) before --target"
            )
    return ax.pipe(cfg, ax.use("kernels", order=(name,), cached=cached, where=wants_kernel))


def _compute_dtype(cfg: Config, path: str) -> Any:
    """The compute dtype of the layer at this path: its own, or that of the nearest ancestor."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        dtypes = getattr(get(cfg, ".".join(parts[:count])), "dtypes", None)
        if dtypes is not None and dtypes.compute is not None:
            return dtypes.compute
    return DEFAULT_DTYPES.compute
