"""Kinds of Variables that are no parameters."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from axcore.module.context import layer_index


class GradientState(nnx.Variable[Any]):
    """State whose next value is its gradient, such as the amax history of delayed scaling.

    A custom_vjp rule returns the new value as the cotangent of the old one. The training step differentiates the
    objective with respect to it, keeps it away from the optimizer, and stores the cotangent in its place. Over the
    microbatches of one step the largest value of each element counts.
    """


class DecodingState(nnx.Variable[Any]):
    """What a layer keeps from one decoding call to the next, such as a KV cache. It is no parameter.

    In a scanned stack the arrays of all layers are one, [layer, ...], which goes through the loop whole and is written
    in place. Inside a layer `state[...]` reads and writes that layer's part as usual, at the cost of a copy of it;
    large state is written by `put` and read through `whole` and `layer`, without one.

    Its metadata `axes` names the dimensions, as in `DecodingState(zeros, axes=("batch", None, "kv_head", None))`.
    """

    @property
    def whole(self) -> jax.Array:
        """The array as it is stored: of all layers, where `layer` is not empty."""
        array: jax.Array = self.get_raw_value()
        return array

    @property
    def layer(self) -> tuple[jax.Array, ...]:
        """The index of the calling layer on the leading axes of `whole`; empty where the array is its own."""
        stacked = sum(name == "layer" for name in self.get_metadata().get("axes", ()))
        index = layer_index()
        return index[len(index) - stacked :] if 0 < stacked <= len(index) else ()

    def put(self, at: tuple[Any, ...], values: jax.Array, mode: str = "drop") -> None:
        """Writes some elements of this layer's part in place: `state[at] = values`, in the dtype of the state.

        Args:
            mode: what becomes of indices beyond the end, as in `jax.Array.at`. Negative ones count from the end.
        """
        whole = self.whole
        self.set_raw_value(whole.at[(*self.layer, *at)].set(values.astype(whole.dtype), mode=mode))

    def __getitem__(self, key: Any) -> Any:
        layer = self.layer
        return (self.whole[layer] if layer else self.whole)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        at = (*self.layer, *(key if isinstance(key, tuple) else (key,)))
        whole = self.whole
        if at == (Ellipsis,):
            self.set_raw_value(value)
        else:
            self.set_raw_value(whole.at[at].set(value))
