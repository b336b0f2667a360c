"""Layers: each small, each with slots that features fill."""

import axcore.preflight  # noqa: F401 - before anything below imports flax
from axcore.nn.attention import Attention
from axcore.nn.causal_lm import CausalLM
from axcore.nn.embedding import Embedding
from axcore.nn.feed_forward import FeedForward
from axcore.nn.initializers import FanIn, Initializer, Normal, Ones, Zeros
from axcore.nn.kernel_choice import ChooseKernel, attend, put_kernel, use_kernels
from axcore.nn.kernels import AttentionKernel, KernelRequest, ReferenceKernel, on_platform, refusal
from axcore.nn.kv_cache import ContiguousCache, DecodingState, KVCache, for_decoding
from axcore.nn.linear import Linear
from axcore.nn.masks import And, Causal, Everything, Mask, Or, SameSegment, SlidingWindow, visible
from axcore.nn.norm import RMSNorm
from axcore.nn.third_party import Call, Stock, call, stock
from axcore.nn.tokens import TokenInfo
from axcore.nn.transformer import Repeat, Sequence, TransformerLayer

__all__ = [
    "And",
    "Attention",
    "AttentionKernel",
    "Call",
    "Causal",
    "CausalLM",
    "ChooseKernel",
    "ContiguousCache",
    "DecodingState",
    "Embedding",
    "Everything",
    "FanIn",
    "FeedForward",
    "Initializer",
    "KVCache",
    "KernelRequest",
    "Linear",
    "Mask",
    "Normal",
    "Ones",
    "Or",
    "RMSNorm",
    "ReferenceKernel",
    "Repeat",
    "SameSegment",
    "Sequence",
    "SlidingWindow",
    "Stock",
    "TokenInfo",
    "TransformerLayer",
    "Zeros",
    "attend",
    "call",
    "for_decoding",
    "on_platform",
    "put_kernel",
    "refusal",
    "stock",
    "use_kernels",
    "visible",
]
