"""The rule for NVIDIA GPUs. The measurements are in benchmarks/RESULTS.md of axcore."""

from __future__ import annotations

import jax.numpy as jnp

from axcore.parallel.compiler_options import Value
from axcore.plugin import Accelerator
from axcore.train import Trainer
from axcore_mesh_rules.fit import SCANNED, UNROLLED, fitted
from axcore_mesh_rules.kernels import with_grouped_matmul, with_kernel
from axcore_mesh_rules.sizes import Sizes, memory

MAX_COMBINED_BYTES = 2**30
"""Upper limit of the size of a combined collective."""
CUDNN_KINDS = ("h100", "h200", "b200")
"""GPUs on which cuDNN attention supports packed rows."""
HOPPER = ("h100", "h200")
"""GPUs for which axcore-mosaic-gpu has a grouped product."""
HALF = (jnp.bfloat16, jnp.float16)
"""The dtypes that cuDNN attention and this grouped product support. Attention of other dtypes keeps its kernel."""


def gpu(cfg: Trainer.Config, accelerator: Accelerator) -> Trainer.Config:
    """FSDP over as few hosts as the state requires, remat and microbatches that fit, and compiler options. On the
    GPUs in `CUDNN_KINDS`, attention layers of 16-bit dtypes without an explicit kernel get the cuDNN kernel. On all of
    these GPUs, engines decode and compute parts of prompts with `paged-attention`. On those in `HOPPER`, mixtures of
    experts get the grouped product `mosaic-gpu`; see `with_grouped_matmul`.

    Raises:
        ConfigError: no installed plugin offers one of the kernels or the grouped product.
    """
    kind = accelerator.kind.partition("-")[0]
    sizes = Sizes.of(cfg)
    # Unrolled layers without remat were measured with cuDNN attention on up to four GPUs.
    policies = (UNROLLED, *SCANNED) if accelerator.hosts == 1 and kind in CUDNN_KINDS else SCANNED
    cfg = fitted(cfg, accelerator, sizes, memory(accelerator), policies)
    cfg = cfg.set(compiler_options={**cfg.compiler_options, **options(kind, accelerator.count, sizes)})
    if kind in HOPPER:
        cfg = with_grouped_matmul(cfg, "mosaic-gpu", HALF)
    # The first serves engines only. On A100s the second is the default kernel, since cuDNN does not support packed
    # rows there.
    return with_kernel(cfg, ("paged-attention", "cudnn" if kind in CUDNN_KINDS else "reference"), HALF)


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
