"""Logical axes: the names of array dimensions that mesh rules map to mesh axes."""

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
        "vocab": "rows of an embedding, columns of an output head, logits",
        "expert": "experts of a mixture of experts",
        "layer": "layers of a scanned stack",
    }
)
"""The logical axes of the core and their meanings. Parameters may use other names. A layer whose activations have
further axes declares them in `Layer.activation_axes`."""
