"""The rule for TPUs. It was not measured on TPUs; libtpu 0.0.52 accepts the options."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp

from axcore.parallel.compiler_options import Value
from axcore.plugin import Accelerator
from axcore.train import Trainer
from axcore_mesh_rules.fit import SCANNED, fitted
from axcore_mesh_rules.kernels import with_kernel
from axcore_mesh_rules.sizes import Sizes, memory

ALL_GATHER: Mapping[str, Value] = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
}
"""Overlaps the all-gathers of FSDP with computation (CF_FOR_ALL_GATHER in MaxText's benchmarks/xla_flags_library.py).
Only for slices of more than 8 chips: a public preset reports that a 1B model on v6e-8 is 5% slower with these
options."""
FUSED_ALL_GATHER: Mapping[str, Value] = {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": True}
"""Fuses all-gathers into matrix products, for v5e only: for other TPUs, libtpu cannot compile any all-gather with
it."""
ALL_REDUCE: Mapping[str, Value] = {
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
}
"""Overlaps all-reduces over slices with computation (DATA_PARALLEL_OVERLAP in the same file)."""
SCOPED_VMEM: Mapping[str, Value] = {"xla_tpu_scoped_vmem_limit_kib": 98304}
"""More VMEM for fusions (DENSE_VMEM_LIMIT_FLAG in the same file, which its models for v6e use)."""
SPLASH_DTYPES = (jnp.bfloat16, jnp.float32)
"""The dtypes that Splash attention supports."""


def tpu(cfg: Trainer.Config, accelerator: Accelerator) -> Trainer.Config:
    """FSDP over as few slices as the state requires, remat and microbatches that fit, and compiler options. Attention
    layers of `SPLASH_DTYPES` without an explicit kernel get Splash attention.

    Raises:
        ConfigError: no installed plugin offers Splash attention.
    """
    cfg = fitted(cfg, accelerator, Sizes.of(cfg), memory(accelerator), SCANNED)
    options = {
        **(ALL_GATHER if accelerator.per_host > 8 else {}),
        **(FUSED_ALL_GATHER if accelerator.kind == "v5e" and accelerator.per_host > 8 else {}),
        **(ALL_REDUCE if accelerator.hosts > 1 else {}),
        **(SCOPED_VMEM if accelerator.kind == "v6e" and accelerator.per_host > 8 else {}),
    }
    cfg = cfg.set(compiler_options={**cfg.compiler_options, **options})
    return with_kernel(cfg, ("splash",), SPLASH_DTYPES)
