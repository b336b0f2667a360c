"""The base of attention kernels: softmax(q k^T) v under a mask."""

from __future__ import annotations

from typing import ClassVar

from axcore.config import REQUIRED, ConfigError
from axcore.module import Layer
from axcore.nn.attention.formula import gradients
from axcore.nn.attention.inputs import LSE, AttentionInputs, Heads
from axcore.nn.attention.request import KernelRequest
from axcore.nn.kv.views import Contiguous, KVView


class AttentionKernel(Layer):
    """Base of the layers that fill attention's kernel slot."""

    class Config(Layer.Config):
        head_dim: int = REQUIRED

    takes: ClassVar[frozenset[str] | set[str]] = frozenset()
    """Which of `softcap`, `sinks`, `bias`, `dropout` and `lse` it computes. It is never asked for others."""

    views: ClassVar[tuple[type[KVView], ...]] = (Contiguous,)
    """The views of keys and values that it reads. Others are gathered into plain arrays first."""

    tags_heads: ClassVar[bool] = False
    """Whether it tags its heads as `heads` for remat policies itself, inside a gradient rule of its own."""

    local: ClassVar[bool] = True
    """Whether it runs under `shard_map` and sees the rows, heads and queries of one device, with all keys of its rows.
    False for one that the compiler partitions, or that calls another kernel through `attend`."""

    def supports(self, request: KernelRequest) -> str | None:
        """None if this kernel can do it; else why not, as in "requires a GPU"."""
        return None

    def __call__(self, inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
        """Attends.

        Returns:
            The heads, [batch, query, head, value_dim] in the dtype of q; what a query that sees no key gets is not
            defined. And, if `inputs.return_lse`, the log-sum-exp of the logits of each query, sinks included, float32
            [batch, query, head]; otherwise None. Gradients flow through the heads only.
        """
        raise NotImplementedError

    def backward(self, inputs: AttentionInputs, heads: Heads, lse: LSE, heads_grad: Heads) -> AttentionInputs:
        """The gradients of one part of the keys, where several calls with parts of the keys were merged into one.

        The default computes the logits again by the formula. A fused kernel overrides it.

        Args:
            inputs: those of the part.
            heads, lse: merged, over all keys and sinks.
            heads_grad: the gradient of `heads`.

        Returns:
            `inputs` with the gradient of each array in its place, None where there is none. `kv` is a `Contiguous`.
        """
        return gradients(inputs, heads, lse, heads_grad)


def refusal(kernel: AttentionKernel, request: KernelRequest) -> str | None:
    """Why this kernel cannot do it: an option that it does not take, or what it says itself."""
    unknown = [name for name in request.options if name not in kernel.takes]
    if unknown:
        return f"it does not take {' and '.join(unknown)}"
    try:
        return kernel.supports(request)
    except Exception as error:
        raise ConfigError(f"{type(kernel).__name__}.supports raised {type(error).__name__}: {error}") from error
