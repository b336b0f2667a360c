"""The core's own offers, made through the same hooks as those of plugins. Imports neither jax nor flax."""

from axcore.plugin import AttentionKernelOffer, Feature, KVCacheOffer, OptimizerOffer, SourceOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_features() -> list[Feature]:
    features = "axcore.nn.features"
    return [
        Feature("dropout", f"{features}:use_dropout", "Dropout wherever a layer has a rate for it."),
        Feature("fused-qkv", f"{features}:use_fused_qkv", "Queries, keys and values in one product."),
        Feature("kernels", "axcore.nn:use_kernels", "Attention kernels in an order of preference, by backend."),
        Feature("qk-norm", f"{features}:use_qk_norm", "Normalized queries and keys."),
        Feature(
            "run-weights",
            "axcore.train:use_run_weights",
            "Weights of another run or a model folder.",
        ),
        Feature("sliding-window", f"{features}:use_sliding_window", "Attention to near tokens, in all or most layers."),
    ]


@hookimpl
def axcore_attention_kernels() -> list[AttentionKernelOffer]:
    return [
        AttentionKernelOffer("reference", "axcore.nn:ReferenceKernel", "The formula of attention, on any platform.")
    ]


@hookimpl
def axcore_kv_caches() -> list[KVCacheOffer]:
    return [KVCacheOffer("contiguous", "axcore.nn:ContiguousCache", "All keys and values in one array per layer.")]


@hookimpl
def axcore_optimizers() -> list[OptimizerOffer]:
    return [OptimizerOffer("adamw", "axcore.train:AdamW", "Adam with decoupled weight decay.")]


@hookimpl
def axcore_input_sources() -> list[SourceOffer]:
    return [
        SourceOffer("json-lines", "axcore.train.data:JsonLines", "A document for each line of a JSON lines file."),
        SourceOffer("text-files", "axcore.train.data:TextFiles", "The text files below a folder."),
    ]
