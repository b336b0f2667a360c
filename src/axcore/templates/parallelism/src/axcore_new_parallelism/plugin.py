"""What axcore-new-parallelism offers. Imports neither jax nor flax."""

from axcore.plugin import ContextParallelismOffer, MeshRule, PipelineScheduleOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_mesh_rules() -> list[MeshRule]:
    target = "axcore_new_parallelism.rules:pairs"
    summary = "Tensor parallelism over pairs of GPUs, FSDP over the rest of a host, data parallelism over hosts."
    # This pattern matches a name for your own machines, such as gpu-new-parallelism-8x4. The pattern gpu-h100-* would
    # match every machine with H100s.
    return [MeshRule("new-parallelism", target, summary, pattern="gpu-new-parallelism-*")]


@hookimpl
def axcore_context_parallelism() -> list[ContextParallelismOffer]:
    target = "axcore_new_parallelism.context:GatherKeys"
    return [ContextParallelismOffer("new-parallelism-context", target, "Each device gathers all keys and values.")]


@hookimpl
def axcore_pipeline_schedules() -> list[PipelineScheduleOffer]:
    target = "axcore_new_parallelism.schedule:OneByOne"
    return [PipelineScheduleOffer("new-parallelism-schedule", target, "One microbatch after another.")]
