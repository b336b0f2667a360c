"""Sharding an attention call over a layout, and running a kernel on the shards."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from axcore.config import ConfigError, has_field
from axcore.nn.attention.inputs import LSE, AttentionInputs, Heads
from axcore.nn.attention.kernel import AttentionKernel, checked
from axcore.nn.attention.request import KernelRequest
from axcore.nn.kv.views import Contiguous, KVView, token_axes
from axcore.parallel import ContextParallelism, Layout, active_layout, is_sharded, shard_map
from axcore.parallel.axes import MeshAxes, group_of


@dataclasses.dataclass(frozen=True)
class Shards:
    """The mesh axes of each dimension of an attention call. A dimension is not sharded if its size is not a multiple of
    the number of devices.

    Attributes:
        layout: the active layout.
        kv_head: None if each device gets all kv heads and selects those that its query heads use.
    """

    layout: Layout
    batch: MeshAxes
    seq: MeshAxes
    head: MeshAxes
    kv_head: MeshAxes

    @classmethod
    def of(cls, inputs: AttentionInputs) -> Shards | None:
        """The shards under the active layout; None without a layout of several devices."""
        layout = active_layout()
        if layout is None or not is_sharded():
            return None
        batch, seq, head, _ = layout.spec(("batch", "seq", "head", None), inputs.q.shape)
        kv_head = layout.spec(("batch", None, "kv_head", None), inputs.keys.shape)[2]
        return cls(layout, batch, seq, head, kv_head if kv_head == head else None)

    @property
    def context(self) -> ContextParallelism | None:
        """The strategy of context parallelism, which also shards keys over `seq`. None: each device gets all keys."""
        return self.layout.context if self.layout.size_of(self.seq) > 1 else None

    @property
    def selects_kv_heads(self) -> bool:
        """Whether each device gets all kv heads and selects those that its query heads use."""
        return self.kv_head is None and self.head is not None

    def check(self, inputs: AttentionInputs, path: str) -> None:
        """Checks that the strategy of context parallelism can compute the call.

        Raises:
            ConfigError: it cannot.
        """
        strategy, axes = self.layout.context, group_of(self.layout.spec(("batch", "seq", "head", None))[1])
        num_shards, key_len = self.layout.size_of(self.seq), inputs.keys.shape[1]
        if strategy is None or self.layout.size_of(axes) == 1:
            return
        reason: str | None = None
        if inputs.phase != "train":
            reason = "does not read a KV cache. Set mesh.context=None for decoding"
        elif key_len % num_shards:
            reason = f"requires a number of keys that is a multiple of {num_shards}, got {key_len}"
        elif self.context is not None:
            reason = strategy.refusal(self.part(inputs), num_shards)
        if reason is not None:
            sizes = ", ".join(f"{axis}={self.layout.size_of(axis)}" for axis in axes)
            raise ConfigError(f"{path}: mesh.context={type(strategy).__name__} with {sizes} {reason}")

    def requests(self, kernel: AttentionKernel, inputs: AttentionInputs) -> tuple[KernelRequest, ...]:
        """The different calls of the kernel on one device."""
        part = self.part(inputs)
        if self.context is None or not self.runs(kernel):
            return (part,)
        return self.context.requests(part, self.layout.size_of(self.seq))

    def runs(self, kernel: AttentionKernel) -> bool:
        """Whether the kernel runs by `run`. A kernel that calls another one by `attend` runs on all devices at once, as
        does one that the compiler partitions, except with a strategy of context parallelism."""
        return kernel.local or (self.context is not None and not wraps(kernel))

    def part(self, inputs: AttentionInputs) -> KernelRequest:
        """The call with the part of one device."""
        whole, num_shards = KernelRequest.of(inputs), self.layout.size_of
        heads = whole.num_heads // num_shards(self.head)
        kv_heads = whole.num_kv_heads // num_shards(self.kv_head)
        if self.selects_kv_heads:
            kv_heads = _num_selected_kv_heads(whole.num_heads // whole.num_kv_heads, heads)
        is_plain = self.context is not None or self.selects_kv_heads
        return dataclasses.replace(
            whole,
            batch=whole.batch // num_shards(self.batch),
            query_len=whole.query_len // num_shards(self.seq),
            key_len=whole.key_len if self.context is None else whole.key_len // num_shards(self.seq),
            num_heads=heads,
            num_kv_heads=kv_heads,
            aligned=whole.aligned and (self.context is not None or num_shards(self.seq) == 1),
            view=Contiguous if is_plain else whole.view,
            codes=None if is_plain else whole.codes,
            page_size=None if is_plain else whole.page_size,
        )

    def run(self, kernel: AttentionKernel, inputs: AttentionInputs, path: str) -> tuple[Heads, LSE | None]:
        """Runs the kernel under `shard_map`, on each device's rows, heads and queries. Without a strategy of context
        parallelism, each device has all keys of its rows."""
        context, num_shards = self.context, self.layout.size_of(self.seq)
        aligned = inputs.query is inputs.keys.tokens and (context is not None or num_shards == 1)
        axes, (batch, _, num_heads, _) = group_of(self.seq), inputs.q.shape
        head_indices = jnp.arange(num_heads, dtype=jnp.int32)
        group = num_heads // inputs.keys.shape[2]
        if inputs.bias is not None:
            inputs = inputs.replace(bias=dataclasses.replace(inputs.bias, heads=head_indices))
        if inputs.dropout is not None:
            rows = jnp.arange(batch, dtype=jnp.int32)
            inputs = inputs.replace(dropout=dataclasses.replace(inputs.dropout, rows=rows, heads=head_indices))
        if self.selects_kv_heads or context is not None:
            inputs = inputs.replace(kv=inputs.plain)

        def body(kernel: AttentionKernel, inputs: AttentionInputs, head_indices: jax.Array) -> tuple[jax.Array, ...]:
            if self.selects_kv_heads:
                inputs = inputs.replace(kv=_select_kv_heads(inputs.plain, head_indices, group))
            inputs = inputs.replace(query=inputs.keys.tokens) if aligned else inputs  # shard_map makes copies
            found = kernel(inputs) if context is None else context.attend(kernel, inputs, axes, num_shards)
            heads, lse = checked(kernel, path, inputs, found)
            return (heads,) if lse is None else (heads, lse)

        specs = self._specs(inputs)
        found = shard_map(
            body,
            layout=self.layout,
            in_specs=(specs, PartitionSpec(self.head)),
            out_specs=(specs.q, PartitionSpec(*specs.q[:3]))[: 1 + inputs.return_lse],
        )(kernel, inputs, head_indices)
        return found if inputs.return_lse else (found[0], None)

    def _specs(self, inputs: AttentionInputs) -> AttentionInputs:
        """`inputs` with each array replaced by its partition spec."""
        kv_seq = None if self.context is None else self.seq
        mesh_axes = {"batch": self.batch, "seq": self.seq, "head": self.head, "kv_head": self.kv_head, "kv_seq": kv_seq}

        def placed(axes: PartitionSpec) -> PartitionSpec:
            return PartitionSpec(*(None if name is None else mesh_axes[name] for name in axes))

        logical = inputs.replace(
            q=PartitionSpec("batch", "seq", "head", None),
            kv=inputs.keys.axes(),
            query=token_axes(inputs.query, "seq"),
            sinks=None if inputs.sinks is None else PartitionSpec("head"),
        )
        if inputs.bias is not None:
            whole = jax.tree.map(lambda _: PartitionSpec(), inputs.bias.state)
            bias = dataclasses.replace(inputs.bias, state=whole, heads=PartitionSpec("head"))  # type: ignore[arg-type]
            logical = logical.replace(bias=bias)
        if inputs.dropout is not None:
            rows, heads = PartitionSpec("batch"), PartitionSpec("head")
            dropout = dataclasses.replace(inputs.dropout, key=PartitionSpec(), rows=rows, heads=heads)  # type: ignore
            logical = logical.replace(dropout=dropout)
        specs: AttentionInputs = jax.tree.map(placed, logical)
        return specs


def wraps(kernel: AttentionKernel) -> bool:
    """Whether the kernel calls another kernel."""
    return has_field(kernel.config, "kernel")


def readable(kernel: AttentionKernel, inputs: AttentionInputs) -> AttentionInputs:
    """The inputs; `kv` is gathered into a `Contiguous` unless the kernel reads its view."""
    views: tuple[type[KVView], ...] = kernel.views
    return inputs if isinstance(inputs.kv, views) else inputs.replace(kv=inputs.plain)


def _num_selected_kv_heads(group: int, heads: int) -> int:
    """The number of kv heads that a device selects: one if all its query heads share it, else one per query head."""
    return 1 if group % heads == 0 else heads


def _select_kv_heads(kv: Contiguous, heads: jax.Array, group: int) -> Contiguous:
    """Selects the kv heads of these query heads."""
    indices = heads // group
    indices = indices[:1] if _num_selected_kv_heads(group, heads.size) == 1 else indices
    return dataclasses.replace(kv, k=kv.k[:, :, indices], v=kv.v[:, :, indices])
