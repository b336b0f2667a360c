"""The static description of one device's share of an attention call, from which kernels are chosen."""

from __future__ import annotations

import dataclasses

import numpy as np

from axcore.nn.attention.inputs import AttentionInputs
from axcore.nn.attention.masks import Mask
from axcore.nn.kv.views import Contiguous, KVView
from axcore.nn.tokens import Phase
from axcore.parallel import target_device

OPTIONS = ("softcap", "sinks", "bias", "dropout", "lse")
"""The options that a kernel supports only if it lists them in `takes`."""


@dataclasses.dataclass(frozen=True)
class KernelRequest:
    """One device's share of an attention call. All fields are static: they are known at trace time.

    Attributes:
        platform: "cpu", "gpu", "tpu" or another platform of JAX, such as "neuron": that of the active layout, or of
            this process without a layout.
        device_kind: the kind of device as JAX names it, such as "NVIDIA H100 80GB HBM3"; empty if unknown.
        dtype: dtype of q.
        batch, query_len, key_len, num_heads, num_kv_heads: sizes of one device's shard.
        head_dim: features of a query or key.
        value_dim: features of a value.
        scale: multiplies the logits.
        mask: which of the valid keys a query sees.
        packed: whether tokens have segment ids.
        partial: whether some keys may be invalid (`TokenInfo.valid` is given).
        aligned: whether query i and key i are the same token, as without a KV cache.
        phase: without a KV cache, prefill or decoding.
        options: the members of `OPTIONS` that the call uses.
        view: type of the KV view.
        codes: dtype of the codes in the view; None if keys and values are not quantized.
        page_size: tokens in a page of the view; None if it has no pages.
        valid_first: whether the valid keys of each row come first (`TokenInfo.valid_first`).
        training: whether the call is part of a training step.
    """

    platform: str
    device_kind: str
    dtype: np.dtype[np.generic]
    batch: int
    query_len: int
    key_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    mask: Mask
    packed: bool
    partial: bool
    aligned: bool
    phase: Phase
    options: tuple[str, ...]
    view: type[KVView]
    codes: np.dtype[np.generic] | None = None
    page_size: int | None = None
    valid_first: bool = False
    training: bool = False

    @classmethod
    def of(cls, inputs: AttentionInputs) -> KernelRequest:
        """The request of a call whose inputs are on one device."""
        kv = inputs.keys
        _, key_len, num_kv_heads, head_dim = kv.shape
        used = {
            "softcap": inputs.softcap is not None,
            "sinks": inputs.sinks is not None,
            "bias": inputs.bias is not None,
            "dropout": inputs.dropout is not None,
            "lse": inputs.return_lse,
        }
        platform, device_kind = target_device()
        return cls(
            platform=platform,
            device_kind=device_kind,
            dtype=inputs.q.dtype,
            batch=inputs.q.shape[0],
            query_len=inputs.q.shape[1],
            key_len=key_len,
            num_heads=inputs.q.shape[2],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=kv.value_dim,
            scale=inputs.scale,
            mask=inputs.mask,
            packed=inputs.query.segment_ids is not None or kv.tokens.segment_ids is not None,
            partial=kv.tokens.valid is not None,
            aligned=inputs.query is kv.tokens,
            phase=inputs.phase,
            options=tuple(name for name in OPTIONS if used[name]),
            view=type(kv),
            codes=None if kv.codes is None else np.dtype(kv.codes),
            page_size=kv.page_size,
            valid_first=kv.tokens.valid_first,
            training=inputs.training,
        )

    @property
    def signature(self) -> str:
        """What the best block sizes depend on, apart from the device. Batches of any size share them."""
        heads = f"{self.num_heads}:{self.num_kv_heads}x{self.head_dim}:{self.value_dim}"
        facts = [self.phase, str(self.dtype), f"{self.query_len}:{self.key_len}x{heads}", repr(self.mask)]
        facts += [word for word, holds in (("packed", self.packed), ("partial", self.partial)) if holds]
        facts += [] if self.view is Contiguous else [self.view.__name__]
        facts += [str(each) for each in (self.codes, self.page_size) if each is not None]
        return " ".join([*facts, *self.options])

    def __str__(self) -> str:
        names = ["batch", "query_len", "key_len", "num_heads", "num_kv_heads", "head_dim"]
        names += ["value_dim"] if self.value_dim != self.head_dim else []
        facts = [self.platform, self.phase, str(self.dtype), *(f"{name}={getattr(self, name)}" for name in names)]
        facts += [f"mask={self.mask!r}"]
        facts += [word for word, holds in (("packed rows", self.packed), ("invalid keys", self.partial)) if holds]
        facts += [] if self.view is Contiguous else [self.view.__name__]
        return ", ".join([*facts, *self.options])
