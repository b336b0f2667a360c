"""Layers: each small, each with slots that features fill."""

from axcore.nn.attention import Attention
from axcore.nn.causal_lm import CausalLM
from axcore.nn.embedding import Embedding
from axcore.nn.feed_forward import FeedForward
from axcore.nn.initializers import FanIn, Initializer, Normal, Ones, Zeros
from axcore.nn.kernels import AttentionKernel, ReferenceKernel
from axcore.nn.linear import Linear
from axcore.nn.masks import And, Causal, Everything, Mask, Or, SameSegment, SlidingWindow
from axcore.nn.norm import RMSNorm
from axcore.nn.third_party import Call, Stock, call, stock
from axcore.nn.tokens import TokenInfo
from axcore.nn.transformer import Repeat, TransformerLayer

__all__ = [
    "And",
    "Attention",
    "AttentionKernel",
    "Call",
    "Causal",
    "CausalLM",
    "Embedding",
    "Everything",
    "FanIn",
    "FeedForward",
    "Initializer",
    "Linear",
    "Mask",
    "Normal",
    "Ones",
    "Or",
    "RMSNorm",
    "ReferenceKernel",
    "Repeat",
    "SameSegment",
    "SlidingWindow",
    "Stock",
    "TokenInfo",
    "TransformerLayer",
    "Zeros",
    "call",
    "stock",
]
