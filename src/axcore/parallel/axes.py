"""Logical axes, which are names of array dimensions, and the mesh axes that rules map them to."""

from __future__ import annotations

from collections.abc import Mapping

from axcore.config import FrozenDict

LOGICAL_AXES: Mapping[str, str] = FrozenDict(
    {
        "batch": "rows of a batch or of decoding state",
        "seq": "tokens in a row",
        "embed": "features of the residual stream, in parameters",
        "embed_activation": "features of the residual stream, in activations",
        "mlp": "hidden features of feed-forward blocks, in parameters and activations",
        "head": "query heads, or query heads and their features in one dimension",
        "kv_head": "key and value heads, or these heads and their features in one dimension",
        "head_dim": "features of one head",
        "kv_seq": "keys, in decoding state",
        "page": "pages of keys that all rows share, in decoding state",
        "vocab": "rows of an embedding, columns of an output head, logits",
        "expert": "experts of a mixture of experts",
        "layer": "layers of a scanned stack",
    }
)
"""The logical axes of the core and their meanings. Parameters may use other names. A layer whose activations have
further axes declares them in `Layer.activation_axes`."""

MeshAxes = str | tuple[str, ...] | None
"""The mesh axes of a logical axis, in rules and in partition specs."""

MESH_AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
"""The standard mesh axes, in mesh order: those that need the fastest links come last.

pipeline: stages of layers. data: replicas of the parameters. fsdp: shards of the parameters and of the batch. expert:
shards of the experts and of the batch. context: shards of the sequence. tensor: shards of heads and hidden features."""

STANDARD_RULES: Mapping[str, MeshAxes] = FrozenDict(
    {
        "batch": ("data", "fsdp", "expert"),
        "seq": "context",
        "embed": ("fsdp", "expert", "context"),
        "expert": "expert",
        "head": "tensor",
        "kv_head": "tensor",
        "mlp": "tensor",
        "vocab": "tensor",
        "layer": "pipeline",
    }
)
"""Rules for any mesh of the standard axes. Parameters other than experts are also sharded over the axes expert and
context, along which they would otherwise be replicated."""

MAJOR_AXES = ("head", "kv_head", "mlp")
"""Logical axes of parameters that the mesh axes of `embed` shard instead if they come first; see
`Layout.variable_spec`."""


def group_of(axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes of a rule or of one entry of a partition spec, as a tuple."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def entry_of(group: tuple[str, ...]) -> MeshAxes:
    """The entry of a partition spec for these mesh axes."""
    return group if len(group) > 1 else group[0] if group else None
