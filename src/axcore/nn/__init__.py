"""Layers: each small, each with slots that features fill."""

import axcore.preflight  # noqa: F401 - before anything below imports flax
from axcore.nn.attention import Attention
from axcore.nn.base_attention import BaseAttention
from axcore.nn.causal_lm import MASKED_LOGIT, CausalLM, Prediction
from axcore.nn.dropout import dropout
from axcore.nn.embedding import Embedding
from axcore.nn.feed_forward import ClampedSwiGLU, FeedForward, Gating, combined
from axcore.nn.initializers import FanIn, Initializer, Normal, Ones, Zeros
from axcore.nn.kernel_choice import ChooseKernel, attend, put_kernel, use_kernels
from axcore.nn.kernels import AttentionKernel, KernelRequest, ReferenceKernel, on_platform, refusal
from axcore.nn.kv_cache import ContiguousCache, DecodingState, KVCache, for_decoding
from axcore.nn.latent_attention import LatentAttention
from axcore.nn.linear import Linear
from axcore.nn.masks import And, Causal, Everything, Mask, Or, SameSegment, SlidingWindow, visible
from axcore.nn.multi_token import FutureToken
from axcore.nn.norm import AcrossHeads, LayerNorm, RMSNorm, Scale
from axcore.nn.stacks import Place, by_layer, edit_layers, layers_of, stacked
from axcore.nn.third_party import Call, Stock, call, stock
from axcore.nn.tokens import TokenInfo
from axcore.nn.transformer import ParallelLayer, PostNormLayer, Repeat, Sequence, TransformerLayer

__all__ = [
    "MASKED_LOGIT",
    "AcrossHeads",
    "And",
    "Attention",
    "AttentionKernel",
    "BaseAttention",
    "Call",
    "Causal",
    "CausalLM",
    "ChooseKernel",
    "ClampedSwiGLU",
    "ContiguousCache",
    "DecodingState",
    "Embedding",
    "Everything",
    "FanIn",
    "FeedForward",
    "FutureToken",
    "Gating",
    "Initializer",
    "KVCache",
    "KernelRequest",
    "LatentAttention",
    "LayerNorm",
    "Linear",
    "Mask",
    "Normal",
    "Ones",
    "Or",
    "ParallelLayer",
    "Place",
    "PostNormLayer",
    "Prediction",
    "RMSNorm",
    "ReferenceKernel",
    "Repeat",
    "SameSegment",
    "Scale",
    "Sequence",
    "SlidingWindow",
    "Stock",
    "TokenInfo",
    "TransformerLayer",
    "Zeros",
    "attend",
    "by_layer",
    "call",
    "combined",
    "dropout",
    "edit_layers",
    "for_decoding",
    "layers_of",
    "on_platform",
    "put_kernel",
    "refusal",
    "stacked",
    "stock",
    "use_kernels",
    "visible",
]
