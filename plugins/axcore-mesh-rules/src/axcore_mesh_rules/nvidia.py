"""The rule for NVIDIA GPUs. The measurements are in benchmarks/RESULTS.md of axcore."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import axcore as ax
from axcore.config import Config, ConfigError, has_field, walk
from axcore.config.tree import get
from axcore.module.layer import DEFAULT_DTYPES
from axcore.nn import ReferenceKernel
from axcore.parallel.compiler_options import Value
from axcore.plugin import Accelerator, AttentionKernelOffer, registry
from axcore.train import Trainer
from axcore_mesh_rules.fit import SCANNED, UNROLLED, fitted
from axcore_mesh_rules.sizes import Sizes, memory

MAX_COMBINED_BYTES = 2**30
"""Upper limit of the size of a combined collective."""
CUDNN_KINDS = ("h100", "h200", "b200")
"""GPUs on which cuDNN attention supports packed rows."""
CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)
"""The dtypes that cuDNN attention supports."""


def gpu(cfg: Trainer.Config, accelerator: Accelerator) -> Trainer.Config:
    """FSDP over as few hosts as the state requires, remat and microbatches that fit, and compiler options. On the
    GPUs in `CUDNN_KINDS`, attention layers of 16-bit dtypes without an explicit kernel get the cuDNN kernel.

    Raises:
        ConfigError: no installed plugin offers the cuDNN kernel.
    """
    kind = accelerator.kind.partition("-")[0]
    sizes = Sizes.of(cfg)
    # Unrolled layers without remat were measured with cuDNN attention on up to four GPUs.
    policies = (UNROLLED, *SCANNED) if accelerator.hosts == 1 and kind in CUDNN_KINDS else SCANNED
    cfg = fitted(cfg, accelerator, sizes, memory(accelerator), policies)
    cfg = cfg.set(compiler_options={**cfg.compiler_options, **options(kind, accelerator.count, sizes)})
    return with_cudnn(cfg) if kind in CUDNN_KINDS else cfg


def options(kind: str, devices: int, sizes: Sizes | None) -> dict[str, Value]:
    """The compiler options for GPUs of a kind.

    - Thresholds that combine the collectives of one layer: +2.6% for Llama2-7B on two H200s, and 61.0 instead of 60.6%
      MFU on four. A larger threshold would combine the collectives of several layers, which then overlap less with
      computation.
    - Products by cuBLAS instead of Triton: 62.4 instead of 61.0% MFU on four H200s, and half of the compile time.
    - The latency hiding scheduler, with which the figures of four H200s were measured. It is off for B200s, since a
      public report measured a step that is 4% slower with it on GB200s (marin-community/marin#8054).
    """
    found: dict[str, Value] = {}
    if kind in ("h100", "h200"):
        found["xla_gpu_enable_triton_gemm"] = False
    if devices > 1 and kind != "b200":
        found["xla_gpu_enable_latency_hiding_scheduler"] = True
    if devices > 1 and sizes is not None:
        threshold = min(MAX_COMBINED_BYTES, 2 ** max(20, (sizes.layer - 1).bit_length()))
        found["xla_gpu_all_gather_combine_threshold_bytes"] = threshold
        found["xla_gpu_reduce_scatter_combine_threshold_bytes"] = threshold
    return found


def with_cudnn(cfg: Trainer.Config) -> Trainer.Config:
    """The config with the cuDNN kernel in every attention that has the default kernel and computes in 16 bits. cuDNN
    does not support float32."""

    def wants_cudnn(path: str, node: Config) -> bool:
        is_plain = has_field(node, "kernel") and getattr(node, "kernel", None) == ReferenceKernel.Config()
        return is_plain and _compute_dtype(cfg, path) in CUDNN_DTYPES

    path = next((path for path, node in walk(cfg) if wants_cudnn(path, node)), None)
    if path is None:
        return cfg
    if registry.find(AttentionKernelOffer, "cudnn") is None:
        raise ConfigError(
            f"{path}.kernel: the mesh rules for NVIDIA GPUs require the kernel 'cudnn', which no installed plugin "
            f"offers. Install axcore-cudnn, or allow the slower reference kernel: --use kernels:order=(reference,) "
            f"before --target"
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
