"""Kinds of Variables that are no parameters."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import fm32

from axcore.module.context import layer_index


class GradientState(nnx.Variable[Any]):
    """State whose next value is its gradient, such as the amax history of delayed scaling: float32, any shape.

    A custom_vjp rule returns the new value as the cotangent of the old one. The training step differentiates the
    objective with respect to it, keeps it away from the optimizer, and stores the cotangent in its place.

    Where a step reads it more than once (a layer that is called several times, an output head in chunks, microbatches)
    the largest value of each element counts. Where nothing hands it a cotangent it keeps its value.
    """

    def get_value(self, **where: Any) -> Any:
        """What a layer reads: float32, also while the training step differentiates with respect to `maxima`."""
        value = super().get_value(**where)
        return _as_float(value) if getattr(value, "dtype", None) == fm32 else value


def maxima(state: Any) -> Any:
    """The leaves of `GradientState` as a dtype whose cotangents are merged by max, to be differentiated by
    `jax.grad(..., allow_int=True)`. The dtype is that of flax's FP8 layers (`flax.linen.fp8_ops.fm32`)."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, fm32), state)


def overwritten(gradient: Any, old: Any) -> Any:
    """The next values: the gradient with respect to `maxima(old)`, and the old value of what has none."""

    def new(gradient: jax.Array, old: jax.Array) -> jax.Array:
        found = jax.lax.convert_element_type(gradient, jnp.float32)
        return jnp.where(found == -jnp.inf, old, found)

    return jax.tree.map(new, gradient, old)


@jax.custom_vjp  # jax's own rule for this conversion has no transpose
def _as_float(value: Any) -> jax.Array:
    return jax.lax.convert_element_type(value, jnp.float32)


_as_float.defvjp(
    lambda value: (_as_float(value), None), lambda _, cotangent: (jax.lax.convert_element_type(cotangent, fm32),)
)


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

    def put(self, at: tuple[jax.Array, ...], values: jax.Array) -> None:
        """Writes some elements of this layer's part in place: `state[at] = values`, in the dtype of the state.

        Args:
            at: integer arrays for the leading dimensions, broadcastable. What is out of range is not written.
            values: of the shape that `at` broadcasts to, and the other dimensions of the state.
        """
        whole, layer = self.whole, self.layer
        sizes = whole.shape[len(layer) : len(layer) + len(at)]
        values = values.astype(whole.dtype)
        if all(jnp.size(index) == 1 for index in at):  # a slice, which is written faster than a scatter
            first = [jnp.reshape(index, ()) for index in at]
            start: tuple[Any, ...] = (*layer, *first, *(0,) * (whole.ndim - len(layer) - len(at)))
            shape = (*(1,) * (len(layer) + len(at)), *whole.shape[len(layer) + len(at) :])
            inside = functools.reduce(operator.and_, [(i >= 0) & (i < n) for i, n in zip(first, sizes, strict=True)])
            kept = jax.lax.dynamic_slice(whole, start, shape)
            new = jnp.where(inside, values.reshape(shape), kept)
            self.set_raw_value(jax.lax.dynamic_update_slice(whole, new, start))
            return
        at = tuple(jnp.where(index < 0, size, index) for index, size in zip(at, sizes, strict=True))
        self.set_raw_value(whole.at[(*layer, *at)].set(values, mode="drop"))

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
