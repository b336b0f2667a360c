"""What axcore-new-parallelism offers. Imports neither jax nor flax."""

from axcore.plugin import MeshRule, hookimpl

axcore_api = 2


@hookimpl
def axcore_mesh_rules() -> list[MeshRule]:
    target = "axcore_new_parallelism.rules:pairs"
    summary = "FSDP over the GPUs of a host, tensor parallel in pairs of them, data parallel over hosts."
    # A name for your own machines, as in gpu-new-parallelism-8x4; gpu-h100-* would match every machine with H100s.
    return [MeshRule("new-parallelism", target, summary, pattern="gpu-new-parallelism-*")]
