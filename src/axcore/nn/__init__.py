"""Layers with slots that features fill, attention kernels, masks and KV caches."""

import axcore.preflight  # noqa: F401 - before anything below imports flax
from axcore.module import DecodingState
from axcore.nn.activations import exact_gelu, squared_relu
from axcore.nn.attention.base import BaseAttention
from axcore.nn.attention.choice import ChooseKernel, attend, put_kernel, use_kernels
from axcore.nn.attention.context.all_to_all import AllToAll
from axcore.nn.attention.context.ring import RingAttention
from axcore.nn.attention.fused import FusedAttention, FusedKernel
from axcore.nn.attention.grouped_query import Attention
from axcore.nn.attention.inputs import LSE, AttentionInputs, Bias, Dropout, Heads
from axcore.nn.attention.kernel import AttentionKernel, TunableKernel, refusal
from axcore.nn.attention.latent import LatentAttention
from axcore.nn.attention.mask_form import MaskForm, mask_refusal
from axcore.nn.attention.masks import And, Causal, Full, Mask, Or, Prefix, SameSegment, SlidingWindow, visible
from axcore.nn.attention.merging import attend_in_parts, merge_by_lse
from axcore.nn.attention.reference import ReferenceKernel
from axcore.nn.attention.request import KernelRequest
from axcore.nn.causal_lm import MASKED_LOGIT, CausalLM, Prediction
from axcore.nn.documents import Documents
from axcore.nn.dropout import dropout
from axcore.nn.embedding import Embedding
from axcore.nn.feed_forward import ClampedSwiGLU, FeedForward, Gating, combined
from axcore.nn.fusing import Fusion, fused
from axcore.nn.grouped_choice import FirstSupported
from axcore.nn.grouped_linear import GroupedLinear, grouped_each
from axcore.nn.grouped_matmul import Batched, Blocks, Grouped, GroupedMatmul, GroupedRequest, RaggedDot
from axcore.nn.initializers import FanIn, ForEach, Initializer, Normal, Ones, Zeros
from axcore.nn.kv.arrays import ArrayCache
from axcore.nn.kv.cache import KVCache, for_decoding, sized, without_caches
from axcore.nn.kv.contiguous import ContiguousCache
from axcore.nn.kv.paging import Paging
from axcore.nn.kv.views import Contiguous, InCache, KVView, Latent, Paged
from axcore.nn.layer_stack import Place, Stack
from axcore.nn.layouts import column_major, in_compute_dtype
from axcore.nn.linear import Linear
from axcore.nn.matmul import Matmul, Plain, Transposed
from axcore.nn.multi_token import MultiTokenPrediction
from axcore.nn.norm import FullWidthNorm, LayerNorm, PerHeadNorm, RMSNorm, Scale
from axcore.nn.put_numerics import put_numerics, without_numerics
from axcore.nn.recurrent import Recurrent
from axcore.nn.stacks import (
    by_layer,
    edit_layers,
    layers_of,
    unstack_arrays,
    unstacked,
    use_remat,
    use_unroll,
)
from axcore.nn.third_party import Call, Stock, call, stock
from axcore.nn.tokens import ADAPTERS, CachedBlocks, CachedRows, PerToken, Phase, TokenInfo, take_tokens
from axcore.nn.transformer import (
    ParallelLayer,
    PostNormLayer,
    Repeat,
    Sequence,
    TransformerLayer,
    ffn_arguments,
    stacked,
)
from axcore.nn.tuning import Settings, Tuning, tuned_settings
from axcore.nn.weighted import Weighted
from axcore.nn.windowed import Windowed
from axcore.numerics import Numerics, Product

__all__ = [
    "ADAPTERS",
    "LSE",
    "MASKED_LOGIT",
    "AllToAll",
    "And",
    "ArrayCache",
    "Attention",
    "AttentionInputs",
    "AttentionKernel",
    "BaseAttention",
    "Batched",
    "Bias",
    "Blocks",
    "CachedBlocks",
    "CachedRows",
    "Call",
    "Causal",
    "CausalLM",
    "ChooseKernel",
    "ClampedSwiGLU",
    "Contiguous",
    "ContiguousCache",
    "DecodingState",
    "Documents",
    "Dropout",
    "Embedding",
    "FanIn",
    "FeedForward",
    "FirstSupported",
    "ForEach",
    "Full",
    "FullWidthNorm",
    "FusedAttention",
    "FusedKernel",
    "Fusion",
    "Gating",
    "Grouped",
    "GroupedLinear",
    "GroupedMatmul",
    "GroupedRequest",
    "Heads",
    "InCache",
    "Initializer",
    "KVCache",
    "KVView",
    "KernelRequest",
    "Latent",
    "LatentAttention",
    "LayerNorm",
    "Linear",
    "Mask",
    "MaskForm",
    "Matmul",
    "MultiTokenPrediction",
    "Normal",
    "Numerics",
    "Ones",
    "Or",
    "Paged",
    "Paging",
    "ParallelLayer",
    "PerHeadNorm",
    "PerToken",
    "Phase",
    "Place",
    "Plain",
    "PostNormLayer",
    "Prediction",
    "Prefix",
    "Product",
    "RMSNorm",
    "RaggedDot",
    "Recurrent",
    "ReferenceKernel",
    "Repeat",
    "RingAttention",
    "SameSegment",
    "Scale",
    "Sequence",
    "Settings",
    "SlidingWindow",
    "Stack",
    "Stock",
    "TokenInfo",
    "TransformerLayer",
    "Transposed",
    "TunableKernel",
    "Tuning",
    "Weighted",
    "Windowed",
    "Zeros",
    "attend",
    "attend_in_parts",
    "by_layer",
    "call",
    "column_major",
    "combined",
    "dropout",
    "edit_layers",
    "exact_gelu",
    "ffn_arguments",
    "for_decoding",
    "fused",
    "grouped_each",
    "in_compute_dtype",
    "layers_of",
    "mask_refusal",
    "merge_by_lse",
    "put_kernel",
    "put_numerics",
    "refusal",
    "sized",
    "squared_relu",
    "stacked",
    "stock",
    "take_tokens",
    "tuned_settings",
    "unstack_arrays",
    "unstacked",
    "use_kernels",
    "use_remat",
    "use_unroll",
    "visible",
    "without_caches",
    "without_numerics",
]


def __dir__() -> list[str]:
    return __all__
