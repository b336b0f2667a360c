"""Variables that are not parameters: gradient state and decoding state."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import fm32
from jaxtyping import Array, Float, Int, PyTree, Shaped

from axcore.module.context import layer_index


class GradientState(nnx.Variable[jax.Array]):
    """A float32 array whose gradient is its next value, such as the amax history of delayed scaling.

    A custom_vjp rule returns the new value as the cotangent of the old one. The training step differentiates the
    objective with respect to the state, hides it from the optimizer, and replaces it with the cotangent.

    If a step reads the state more than once (a layer that is called several times, a chunked output head,
    microbatches), the elementwise maximum of the cotangents is stored. State without a cotangent keeps its value.
    """

    def get_value(self, **where: object) -> Float[Array, ...]:
        """The float32 value, even while the training step stores the state as `fm32`."""
        value = super().get_value(**where)
        return _as_float(value) if getattr(value, "dtype", None) == fm32 else value


def to_fm32(state: PyTree[Float[Array, ...]]) -> PyTree[Shaped[Array, ...]]:
    """Converts the leaves of `GradientState` to `flax.linen.fp8_ops.fm32`, a dtype whose cotangents are accumulated by
    maximum. Differentiate with `jax.grad(..., allow_int=True)`."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, fm32), state)


def overwrite_with_gradient(
    gradient: PyTree[Shaped[Array, ...]], old: PyTree[Float[Array, ...]]
) -> PyTree[Float[Array, ...]]:
    """The next values of `GradientState`: the gradient with respect to `to_fm32(old)`, or the old value if there is no
    gradient."""

    def new(gradient: Shaped[Array, ...], old: Float[Array, ...]) -> Float[Array, ...]:
        found = jax.lax.convert_element_type(gradient, jnp.float32)
        return jnp.where(found == -jnp.inf, old, found)

    return jax.tree.map(new, gradient, old)


@jax.custom_vjp  # jax defines no transpose for this conversion
def _as_float(value: Shaped[Array, ...]) -> Float[Array, ...]:
    return jax.lax.convert_element_type(value, jnp.float32)


_as_float.defvjp(
    lambda value: (_as_float(value), None), lambda _, cotangent: (jax.lax.convert_element_type(cotangent, fm32),)
)


class DecodingState(nnx.Variable[jax.Array]):
    """State that a layer keeps between decoding calls, such as a KV cache.

    In a scanned stack one array [layer, ...] holds the state of all layers. The loop carries the whole array, which is
    written in place. Inside a layer, `state[...]` copies the slice of that layer to read or write it. To avoid the
    copy, write with `put`, and read with `whole` and `layer`.

    The metadata `axes` names the dimensions, as in `DecodingState(zeros, axes=("batch", None, "kv_head", None))`.
    """

    @property
    def whole(self) -> Shaped[Array, ...]:
        """The stored array, which holds all layers of the stack if `layer` is not empty."""
        array: jax.Array = self.get_raw_value()
        return array

    @property
    def layer(self) -> tuple[Int[Array, ""], ...]:
        """The index of the calling layer on the leading axes of `whole`; empty if the array belongs to one layer."""
        stacked = sum(name == "layer" for name in self.get_metadata().get("axes", ()))
        index = layer_index()
        return index[len(index) - stacked :] if 0 < stacked <= len(index) else ()

    def put(self, at: tuple[Int[Array, ...], ...], values: Shaped[Array, ...]) -> None:
        """Writes in place to the slice of this layer: `state[at] = values`, in the dtype of the state.

        Args:
            at: Integer arrays for the leading dimensions, which broadcast. Writes out of range are dropped; a negative
                index is out of range. Two writes to the same place in range are not defined: XLA would otherwise write
                16-bit floats with atomics, at an eighth of the bandwidth of a GPU.
            values: An array of the shape to which `at` broadcasts, followed by the other dimensions of the state.
        """
        whole, layer = self.whole, self.layer
        sizes = whole.shape[len(layer) : len(layer) + len(at)]
        values = values.astype(whole.dtype)
        if all(jnp.size(index) == 1 for index in at):  # updating a slice is faster than a scatter
            first = [jnp.reshape(index, ()) for index in at]
            start: tuple[jax.Array | int, ...] = (*layer, *first, *(0,) * (whole.ndim - len(layer) - len(at)))
            shape = (*(1,) * (len(layer) + len(at)), *whole.shape[len(layer) + len(at) :])
            inside = functools.reduce(operator.and_, [(i >= 0) & (i < n) for i, n in zip(first, sizes, strict=True)])
            kept = jax.lax.dynamic_slice(whole, start, shape)
            new = jnp.where(inside, values.reshape(shape), kept)
            self.set_raw_value(jax.lax.dynamic_update_slice(whole, new, start))
            return
        at = tuple(jnp.where(index < 0, size, index) for index, size in zip(at, sizes, strict=True))
        self.set_raw_value(whole.at[(*layer, *at)].set(values, mode="drop", unique_indices=True))

    def __getitem__(self, key: object) -> Shaped[Array, ...]:
        layer = self.layer
        return (self.whole[layer] if layer else self.whole)[key]

    def __setitem__(self, key: object, value: Shaped[Array, ...]) -> None:
        at = (*self.layer, *(key if isinstance(key, tuple) else (key,)))
        whole = self.whole
        if at == (Ellipsis,):
            self.set_raw_value(value)
        else:
            self.set_raw_value(whole.at[at].set(value))
