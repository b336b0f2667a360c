"""The rule for TPUs. Nothing here was measured on a TPU; the options are accepted by libtpu 0.0.52."""

from __future__ import annotations

from collections.abc import Mapping

from axcore.parallel.compiler_options import Value
from axcore.plugin import Accelerator
from axcore.train import Trainer
from axcore_mesh_rules.fit import SCANNED, fitted
from axcore_mesh_rules.sizes import Sizes, memory

GATHERS: Mapping[str, Value] = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
}
"""All-gathers of FSDP overlap with computation: CF_FOR_ALL_GATHER of MaxText's benchmarks/xla_flags_library.py. They
are for slices of more than 8 chips: a public preset reports that a 1B model on v6e-8 is 5% slower with them."""
FUSED: Mapping[str, Value] = {"xla_tpu_enable_async_collective_fusion_fuse_all_gather": True}
"""All-gathers as part of products, for v5e: libtpu refuses to compile any all-gather with it for other TPUs."""
REPLICAS: Mapping[str, Value] = {
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
}
"""All-reduces over slices overlap with computation: DATA_PARALLEL_OVERLAP of the same file."""
SCOPED: Mapping[str, Value] = {"xla_tpu_scoped_vmem_limit_kib": 98304}
"""More of the fast memory for fusions: DENSE_VMEM_LIMIT_FLAG of the same file, which its models for v6e use."""


def tpu(cfg: Trainer.Config, accelerator: Accelerator) -> Trainer.Config:
    """FSDP over as few slices as the state requires, remat and microbatches that fit, and compiler options."""
    cfg = fitted(cfg, accelerator, Sizes.of(cfg), memory(accelerator), SCANNED)
    options = {
        **(GATHERS if accelerator.per_host > 8 else {}),
        **(FUSED if accelerator.kind == "v5e" and accelerator.per_host > 8 else {}),
        **(REPLICAS if accelerator.hosts > 1 else {}),
        **(SCOPED if accelerator.kind == "v6e" and accelerator.per_host > 8 else {}),
    }
    return cfg.set(compiler_options={**cfg.compiler_options, **options})
