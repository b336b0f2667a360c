"""Kernels for attention and for mixtures of experts that have the default kernel."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import axcore as ax
from axcore.config import Config, ConfigError, has_field, walk
from axcore.config.tree import get
from axcore.module.layer import DEFAULT_DTYPES
from axcore.nn import Blocks, FirstSupported, ReferenceKernel
from axcore.plugin import AttentionKernelOffer, GroupedMatmulOffer, registry, resolve
from axcore.train import Trainer


def with_kernel(cfg: Trainer.Config, order: tuple[str, ...], dtypes: Collection[Any]) -> Trainer.Config:
    """The config with fused kernels in every attention that has the default kernel and computes in one of `dtypes`.

    Args:
        order: names of kernels. Each call runs the first that supports it. The package `axcore-NAME` offers a kernel,
            or the core.
        dtypes: the dtypes that the kernels support. Attentions of other dtypes keep the default kernel.

    Raises:
        ConfigError: no installed plugin offers one of the kernels.
    """

    def wants_kernel(path: str, node: Config) -> bool:
        is_plain = has_field(node, "kernel") and getattr(node, "kernel", None) == ReferenceKernel.Config()
        return is_plain and _compute_dtype(cfg, path) in dtypes

    path = next((path for path, node in walk(cfg) if wants_kernel(path, node)), None)
    if path is None:
        return cfg
    for each in order:
        if registry.find(AttentionKernelOffer, each) is None:
            raise ConfigError(
                f"{path}.kernel: the mesh rule for this target requires the kernel {each!r}, which no installed "
                f"plugin offers. Install axcore-{each}, or allow the slower reference kernel: "
                f"--use kernels:order=(reference,) before --target"
            )
    return ax.pipe(cfg, ax.use("kernels", order=order, where=wants_kernel))


def with_grouped_matmul(cfg: Trainer.Config, name: str, dtypes: Collection[Any]) -> Trainer.Config:
    """The config with a grouped product in every mixture of experts that has the default `Blocks()` and computes in one
    of `dtypes`. Mixtures that the product does not support, such as those with numerics, use `Blocks()`.

    Args:
        name: name of the grouped product. The package `axcore-NAME` offers it.

    Raises:
        ConfigError: no installed plugin offers the grouped product.
    """
    slots = [
        path
        for path, node in walk(cfg)
        if has_field(node, "matmul")
        and getattr(node, "matmul", None) == Blocks()
        and _compute_dtype(cfg, path) in dtypes
    ]
    if not slots:
        return cfg
    found = registry.find(GroupedMatmulOffer, name)
    if found is None:
        raise ConfigError(
            f"{slots[0]}.matmul: the mesh rule for this target requires the grouped matmul {name!r}, which no "
            f"installed plugin offers. Install axcore-{name}, or choose the slower blocks of a fixed size: --use "
            f"blocks:size=512 before --target"
        )
    order = FirstSupported(order=(resolve(*found)(), Blocks()))
    return ax.select(cfg, lambda path, _: path in slots).set(matmul=order)


def _compute_dtype(cfg: Config, path: str) -> Any:
    """The compute dtype of the layer at this path: its own, or that of the nearest ancestor."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        dtypes = getattr(get(cfg, ".".join(parts[:count])), "dtypes", None)
        if dtypes is not None and dtypes.compute is not None:
            return dtypes.compute
    return DEFAULT_DTYPES.compute
