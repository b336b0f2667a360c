"""The description of a GPU that XLA compiles for without one: a GpuTargetConfigProto as text."""

from __future__ import annotations

from axcore.aot.chips import Chip, Cuda

_TOOLKIT = "13.0.0"
_CUDNN = (9, 12, 0)


def target_config(chip: Chip, cuda: Cuda) -> str:
    """The text that `jax.experimental.topologies` takes as `target_config` for CUDA."""
    major, minor = cuda.capability
    accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    per_core, per_block = cuda.shared
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {per_core} shared_memory_per_block_optin: {per_block}
  core_count: {cuda.cores} fpus_per_core: {64 if major == 8 else 128}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {int(chip.bandwidth)} l2_cache_size: {cuda.cache} clock_rate_ghz: {cuda.clock}
  device_memory_size: {chip.memory} cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
  device_vendor: "NVIDIA Corporation" platform_version: "CUDA 13.0" device_address_bits: 64
  pcie_bandwidth: 63000000000 ecc_enabled: true name: "{chip.device_kind}"
  driver_version: "{_TOOLKIT}" runtime_version: "{_TOOLKIT}" compile_time_toolkit_version: "{_TOOLKIT}"
  dnn_version: "{".".join(map(str, _CUDNN))}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} patch: {_CUDNN[2]} }}
device_description_str: "{chip.device_kind}"
"""
