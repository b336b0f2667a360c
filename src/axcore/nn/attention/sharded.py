"""Sharding an attention call over a layout, and running a kernel on the shards."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from axcore.nn.attention.inputs import LSE, AttentionInputs, Heads
from axcore.nn.attention.kernel import AttentionKernel, checked
from axcore.nn.attention.request import KernelRequest
from axcore.nn.kv.views import Contiguous, KVView, token_axes
from axcore.parallel import Layout, active_layout, is_sharded, shard_map
from axcore.parallel.axes import MeshAxes


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

    def request(self, inputs: AttentionInputs) -> KernelRequest:
        """The request of one device."""
        whole, num_shards = KernelRequest.of(inputs), self.layout.size_of
        heads = whole.num_heads // num_shards(self.head)
        kv_heads = whole.num_kv_heads // num_shards(self.kv_head)
        if self.kv_head is None and self.head is not None:
            kv_heads = _num_selected_kv_heads(whole.num_heads // whole.num_kv_heads, heads)
        query_len = whole.query_len // num_shards(self.seq)
        return dataclasses.replace(
            whole,
            batch=whole.batch // num_shards(self.batch),
            query_len=query_len,
            num_heads=heads,
            num_kv_heads=kv_heads,
            aligned=whole.aligned and query_len == whole.query_len,
            view=whole.view if self.kv_head is not None or self.head is None else Contiguous,
        )

    def run(self, kernel: AttentionKernel, inputs: AttentionInputs, path: str) -> tuple[Heads, LSE | None]:
        """Runs the kernel under `shard_map`, on each device's rows, heads and queries and all keys of those rows."""
        batch, _, num_heads, _ = inputs.q.shape
        head_indices = jnp.arange(num_heads, dtype=jnp.int32)
        group = num_heads // inputs.keys.shape[2]
        if inputs.bias is not None:
            inputs = inputs.replace(bias=dataclasses.replace(inputs.bias, heads=head_indices))
        if inputs.dropout is not None:
            rows = jnp.arange(batch, dtype=jnp.int32)
            inputs = inputs.replace(dropout=dataclasses.replace(inputs.dropout, rows=rows, heads=head_indices))
        selects_kv_heads = self.kv_head is None and self.head is not None
        if selects_kv_heads:
            inputs = inputs.replace(kv=inputs.plain)

        def body(kernel: AttentionKernel, inputs: AttentionInputs, head_indices: jax.Array) -> tuple[jax.Array, ...]:
            if selects_kv_heads:
                inputs = inputs.replace(kv=_select_kv_heads(inputs.plain, head_indices, group))
            heads, lse = checked(kernel, path, inputs, kernel(inputs))
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
        mesh_axes = {"batch": self.batch, "seq": self.seq, "head": self.head, "kv_head": self.kv_head, "kv_seq": None}

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
