"""The built-in offers of axcore, registered through the same hooks as a plugin's. Imports neither jax nor flax."""

from axcore.plugin import (
    AttentionKernelOffer,
    ContextParallelismOffer,
    DrafterOffer,
    Feature,
    GroupedMatmulOffer,
    KVCacheOffer,
    OptimizerOffer,
    PipelineScheduleOffer,
    SourceOffer,
    hookimpl,
)

axcore_api = 2


@hookimpl
def axcore_features() -> list[Feature]:
    features, mesh = "axcore.nn.features", "axcore.parallel.features"
    return [
        Feature("context", f"{mesh}:use_context", "Context parallelism: the sequence over several devices."),
        Feature("data", f"{mesh}:use_data", "Data parallelism: replicas of the parameters."),
        Feature("dropout", f"{features}:use_dropout", "Dropout in every layer that has a dropout rate."),
        Feature("expert", f"{mesh}:use_expert", "Expert parallelism: the experts of mixtures over several devices."),
        Feature("fsdp", f"{mesh}:use_fsdp", "FSDP: parameters and the batch over several devices."),
        Feature("fused-qkv", f"{features}:use_fused_qkv", "One linear layer for queries, keys and values."),
        Feature(
            "kernels", "axcore.nn:use_kernels", "Attention kernels in order; each call runs the first that supports it."
        ),
        Feature("optimizer-offload", f"{mesh}:use_optimizer_offload", "Optimizer state in host memory between steps."),
        Feature("pipeline", f"{mesh}:use_pipeline", "Pipeline parallelism: the layers over several devices."),
        Feature("qk-norm", f"{features}:use_qk_norm", "RMSNorm of queries and keys."),
        Feature("remat", f"{features}:use_remat_by_tag", "Rematerialization of layers, except values with given tags."),
        Feature(
            "run-weights",
            "axcore.train:use_run_weights",
            "Initial weights from another run or a model folder.",
        ),
        Feature("sliding-window", f"{features}:use_sliding_window", "Sliding-window attention in all or most layers."),
        Feature("tensor", f"{mesh}:use_tensor", "Tensor parallelism, and sequence parallelism on the same axis."),
        Feature("tuned", "axcore.nn.attention.tuned:use_tuned", "Block sizes of kernels that `axcore tune` measured."),
        Feature("zero", f"{mesh}:use_zero", "ZeRO-1 and ZeRO-2: optimizer state and gradients over replicas."),
    ]


@hookimpl
def axcore_attention_kernels() -> list[AttentionKernelOffer]:
    return [AttentionKernelOffer("reference", "axcore.nn:ReferenceKernel", "Attention in plain JAX, on any platform.")]


@hookimpl
def axcore_context_parallelism() -> list[ContextParallelismOffer]:
    return [
        ContextParallelismOffer("all-to-all", "axcore.nn:AllToAll", "Each device attends with some of the heads."),
        ContextParallelismOffer("ring-attention", "axcore.nn:RingAttention", "Keys and values travel around a ring."),
    ]


@hookimpl
def axcore_pipeline_schedules() -> list[PipelineScheduleOffer]:
    schedules = "axcore.parallel.pipeline"
    return [
        PipelineScheduleOffer("1f1b", f"{schedules}:OneForwardOneBackward", "Forward and backward passes in turn."),
        PipelineScheduleOffer("gpipe", f"{schedules}:GPipe", "All forward passes, then all backward passes."),
        PipelineScheduleOffer("zero-bubble", f"{schedules}:ZeroBubble", "1F1B with weight gradients in idle ticks."),
    ]


@hookimpl
def axcore_kv_caches() -> list[KVCacheOffer]:
    return [KVCacheOffer("contiguous", "axcore.nn:ContiguousCache", "One array of keys and one of values per layer.")]


@hookimpl
def axcore_drafters() -> list[DrafterOffer]:
    drafters = "axcore.infer.speculation"
    return [
        DrafterOffer("draft-model", f"{drafters}:DraftModel", "The tokens that a smaller model samples."),
        DrafterOffer("mtp", f"{drafters}:MTP", "The tokens of the model's own module for multi-token prediction."),
        DrafterOffer("ngram", f"{drafters}:NGram", "What followed the last tokens before, in the prompt or output."),
    ]


@hookimpl
def axcore_grouped_matmuls() -> list[GroupedMatmulOffer]:
    return [
        GroupedMatmulOffer("blocks", "axcore.nn:Blocks", "Blocks of rows, each times a copy of its group's matrix."),
        GroupedMatmulOffer("ragged-dot", "axcore.nn:RaggedDot", "Grouped products by jax.lax.ragged_dot."),
    ]


@hookimpl
def axcore_optimizers() -> list[OptimizerOffer]:
    return [OptimizerOffer("adamw", "axcore.train:AdamW", "Adam with decoupled weight decay.")]


@hookimpl
def axcore_input_sources() -> list[SourceOffer]:
    return [
        SourceOffer("json-lines", "axcore.train.data:JsonLines", "One document per line of a JSON Lines file."),
        SourceOffer("text-files", "axcore.train.data:TextFiles", "One document per text file below a folder."),
    ]
