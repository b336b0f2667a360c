"""Options of the XLA compiler, checked by the installed compiler before a step is compiled with them.

XLA ends the process if the environment variable XLA_FLAGS contains an unknown flag. Here, a small function is compiled
with each option first, so that an invalid option raises an exception. The names and values of options change between
versions of jaxlib, and some are spelled differently in XLA_FLAGS.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxlib.version import __version__ as jaxlib_version

from axcore.config import AnyInt, ConfigError, FiniteFloat
from axcore.config.errors import did_you_mean
from axcore.parallel.layout import Layout

Value = bool | AnyInt | FiniteFloat | str
CompilerOptions = Mapping[str, Value]
"""Options by name, as in `{"xla_gpu_enable_triton_gemm": False}`."""


class CheckedOption(NamedTuple):
    """One option after the check.

    Attributes:
        name: its name in the installed compiler.
        value: its value in the installed compiler.
        note: how it was checked, or why it was not; and the spelling in the config if it differs.
        checked: whether the compiler accepted it. False if this machine lacks the compiler of the target.
    """

    name: str
    value: Value
    note: str
    checked: bool


_PIPELINED = ("all_gather", "all_reduce", "reduce_scatter")

RENAMED: Mapping[str, str] = {
    **{f"xla_gpu_enable_pipelined_{kind}": f"xla_gpu_pipeline_{kind}" for kind in _PIPELINED},
    "xla_gpu_enable_heuristic_collective_combining": "xla_gpu_experimental_enable_heuristic_collective_combining",
}
"""Old name -> name in the current version of jaxlib."""

VALUES: Mapping[str, Mapping[str, Value]] = {
    f"xla_gpu_pipeline_{kind}": {
        "true": "COLLECTIVE_PIPELINING_MODE_ON",
        "on": "COLLECTIVE_PIPELINING_MODE_ON",
        "false": "COLLECTIVE_PIPELINING_MODE_OFF",
        "off": "COLLECTIVE_PIPELINING_MODE_OFF",
    }
    for kind in _PIPELINED
}
"""Name -> an old value or a value in XLA_FLAGS, in lower case -> the value of the option."""

REMOVED: Mapping[str, str] = {
    "xla_cpu_use_thunk_runtime": "the thunk runtime is the only one",
    "xla_gpu_cudnn_gemm_fusion": "set xla_gpu_cudnn_gemm_fusion_level instead",
    "xla_gpu_enable_async_all_gather": "all-gathers are asynchronous by default",
    "xla_gpu_enable_async_collectives": "collectives are asynchronous by default",
    "xla_gpu_enable_cudnn_fusion": "set xla_gpu_cudnn_gemm_fusion_level instead",
    "xla_gpu_enable_pipelined_collectives": "set xla_gpu_pipeline_all_gather, _all_reduce and _reduce_scatter instead",
    "xla_gpu_enable_triton_softmax_fusion": "softmax fusions are always on",
    "xla_gpu_graph_level": 'xla_gpu_enable_command_buffer="" turns CUDA graphs off',
    "xla_gpu_lhs_enable_gpu_async_tracker": "the tracker is always on",
    "xla_gpu_simplify_all_fp_conversions": "the simplification is always on",
}
"""Options that jaxlib no longer has -> what the error message says about them."""

SUGGESTED = (
    *(f"xla_gpu_{kind}_combine_threshold_bytes" for kind in _PIPELINED),
    *(f"xla_gpu_pipeline_{kind}" for kind in _PIPELINED),
    "xla_gpu_autotune_level",
    "xla_gpu_collective_permute_decomposer_threshold",
    "xla_gpu_cudnn_gemm_fusion_level",
    "xla_gpu_deterministic_ops",
    "xla_gpu_disable_async_collectives",
    "xla_gpu_dot_merger_threshold_mb",
    "xla_gpu_enable_analytical_sol_latency_estimator",
    "xla_gpu_enable_command_buffer",
    "xla_gpu_enable_dus_accumulator_zero_init_elimination",
    "xla_gpu_enable_host_memory_offloading",
    "xla_gpu_enable_latency_hiding_scheduler",
    "xla_gpu_enable_nccl_user_buffers",
    "xla_gpu_enable_pipelined_host_offloading",
    "xla_gpu_enable_pipelined_p2p",
    "xla_gpu_enable_triton_gemm",
    "xla_gpu_enable_while_loop_double_buffering",
    "xla_gpu_enable_while_loop_unrolling",
    "xla_gpu_exhaustive_tiling_search",
    "xla_gpu_experimental_enable_fusion_autotuner",
    "xla_gpu_experimental_parallel_collective_overlap_limit",
    "xla_gpu_experimental_use_ragged_dot_fusion",
    "xla_gpu_memory_limit_slop_factor",
    "xla_gpu_multi_streamed_windowed_einsum",
    "xla_gpu_per_fusion_autotune_cache_dir",
    "xla_gpu_threshold_for_windowed_einsum_mib",
    "xla_allow_excess_precision",
    "xla_backend_optimization_level",
    "xla_disable_hlo_passes",
    "xla_dump_to",
    "xla_enable_async_all_gather",
    "xla_enable_async_collective_permute",
    "xla_latency_hiding_scheduler_rerun",
    "xla_max_concurrent_host_send_recv",
    "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
    "xla_tpu_enable_async_collective_fusion_multiple_steps",
    "xla_tpu_enable_data_parallel_all_reduce_opt",
    "xla_tpu_enable_latency_hiding_scheduler",
    "xla_tpu_overlap_compute_collective_tc",
    "xla_tpu_scoped_vmem_limit_kib",
    "xla_tpu_spmd_rng_bit_generator_unsafe",
)
"""Names to suggest for a misspelled one."""


def check_options(options: CompilerOptions, layout: Layout) -> tuple[CheckedOption, ...]:
    """The options in the spelling of the installed compiler, which accepts each of them.

    Args:
        options: the field `compiler_options` of a trainer.
        layout: the layout of the step. The options are checked by the compiler of its devices. Without devices (an
            abstract layout), the CPU compiler checks options of CPUs and GPUs, and options of others are not checked.

    Raises:
        ConfigError: the compiler has no such option, or the value has the wrong type.
    """
    device = _device(layout) if options else None
    found: dict[str, CheckedOption] = {}
    for given, value in options.items():
        name = RENAMED.get(given, given)
        if name in found or (name != given and name in options):
            raise ConfigError(f"compiler_options.{given}: this option is now {name!r}, which is also set. Remove one")
        value = VALUES.get(name, {}).get(str(value).lower(), value)
        given_as = f"; given as {given}={options[given]!r}" if (name, value) != (given, options[given]) else ""
        if given in REMOVED:
            raise ConfigError(
                f"compiler_options.{given}: jaxlib {jaxlib_version} has no such option: {REMOVED[given]}. Remove it"
            )
        if device is None:
            found[name] = CheckedOption(
                name, value, f"not checked: no {layout.platform} compiler here{given_as}", False
            )
            continue
        if error := _refusal(name, value, device):
            raise ConfigError(f"compiler_options.{given}: {_explained(error, name, value, device)}")
        found[name] = CheckedOption(name, value, f"accepted by the compiler{given_as}", True)
    return tuple(found.values())


def checked_options(options: CompilerOptions, layout: Layout) -> dict[str, Value]:
    """The options to compile with; see `check_options`. Warns about each option that was renamed."""
    found = check_options(options, layout)
    for given, option in zip(options, found, strict=True):
        if given != option.name:
            warnings.warn(
                f"compiler_options.{given}: this option is now {option.name}={option.value!r}, which is used",
                stacklevel=2,
            )
    return {option.name: option.value for option in found}


def _device(layout: Layout) -> jax.Device | None:
    """A device whose compiler checks the options of a layout; None if there is none."""
    if isinstance(layout.mesh, jax.sharding.Mesh):
        devices = list(layout.mesh.devices.flat)
        own = (device for device in devices if device.process_index == jax.process_index())
        return next(own, devices[0])
    return jax.local_devices(backend="cpu")[0] if layout.platform in ("cpu", "gpu") else None


@functools.lru_cache(maxsize=None, typed=True)  # typed: True and 1 are different values
def _refusal(name: str, value: Value, device: jax.Device) -> str:
    """The compiler's message if it does not accept the option; empty if it does."""
    one = jax.ShapeDtypeStruct((), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x + 1).lower(one).compile(compiler_options={name: value})
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return str(error)
    return ""


def _explained(message: str, name: str, value: Value, device: jax.Device) -> str:
    """What is wrong with an option that the compiler refused with this message, and what to do."""
    if "No such compile option" not in message:
        reason = message.removeprefix("INVALID_ARGUMENT: ").rstrip(": ")
        return f"jaxlib {jaxlib_version} does not accept the value {value!r}: {reason}"
    if name.startswith("xla_tpu_") and device.platform != "tpu":
        return f"this is an option for TPUs, but the platform is {device.platform!r}. Remove it"
    near = did_you_mean(name, (known for known in SUGGESTED if known != name))
    return f"jaxlib {jaxlib_version} has no such option for the platform {device.platform!r}.{near}"
