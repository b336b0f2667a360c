"""Products of activations with one matrix."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from axcore.config import Config
from axcore.numerics import Product
from axcore.parallel import active_layout, is_sharded
from axcore.parallel.axes import group_of


def rows(x: Float[Array, "*shape features"]) -> Float[Array, "*rows features"]:
    """Merges all dimensions but the last on a single device. Returns `x` if activations may be sharded.

    After merging, the gradient of a weight contracts a single dimension, and XLA needs no transposed copy of `x`:
    forward and backward pass of a feed-forward block are 1.6x faster on CPU. Merging a sharded dimension could cost a
    collective, so the compiler decides. A layer that multiplies one `x` by several weights should merge once;
    otherwise the backward pass stores a copy of `x` for each weight.
    """
    return x if is_sharded() or x.ndim == 2 else x.reshape(-1, x.shape[-1])


def matmul(
    x: Float[Array, "*shape input_dim"],
    weight: Float[Array, "input_dim output_dim"],
    accumulate: DTypeLike | None = None,
) -> Float[Array, "*shape output_dim"]:
    """`x @ weight` in the dtype `accumulate`, or in the dtype of `x` if it is None."""
    y = jnp.matmul(rows(x), weight.astype(x.dtype), preferred_element_type=accumulate)
    return y.reshape(*x.shape[:-1], weight.shape[-1])


def transposed_matmul(
    x: Float[Array, "*shape input_dim"],
    weight: Float[Array, "output_dim input_dim"],
    accumulate: DTypeLike | None = None,
) -> Float[Array, "*shape output_dim"]:
    """`x @ weight.T` in the dtype `accumulate`, or in the dtype of `x` if it is None.

    It contracts the last dimensions. For a single row on CPU, XLA would copy a transposed `weight` element by element.
    """
    x, shape = rows(x), x.shape
    over = ((x.ndim - 1,), (1,)), ((), ())
    y = jax.lax.dot_general(x, weight.astype(x.dtype), over, preferred_element_type=accumulate)
    return y.reshape(*shape[:-1], weight.shape[0])


def _outer(x: jax.Array, y: jax.Array, accumulate: DTypeLike | None) -> jax.Array:
    """The sum of the outer products of rows: [*shape, a], [*shape, b] -> [a, b]."""
    x, y = rows(x), rows(y)
    over = tuple(range(x.ndim - 1))
    return jax.lax.dot_general(x, y, ((over, over), ((), ())), preferred_element_type=accumulate)


class Matmul(Config):
    """Base of the implementations of `x @ weight` with a single matrix. The base itself is XLA's product."""

    reads_columns: ClassVar[bool] = False
    """Whether the matrix is read fastest in column-major order, in which `axcore.infer.Decoder` then stores it."""

    def is_local(self, rows: int) -> bool:
        """Whether products of this many rows run under `shard_map`, where each device has its shard of the matrix, as a
        kernel requires. Otherwise, the compiler partitions them."""
        return False

    def __call__(
        self,
        x: Float[Array, "*shape input_dim"],
        weight: Shaped[Array, "input_dim output_dim"],
        accumulate: DTypeLike | None = None,
        scales: Float[Array, " output_dim"] | None = None,
    ) -> Float[Array, "*shape output_dim"]:
        """The product.

        Args:
            x: activations.
            weight: the matrix in any dtype, such as int8 codes; its values count as they are.
            accumulate: dtype of the sums and of the result; None: the dtype of x.
            scales: factors of the outputs. With them, sums are in float32 and only the result has the dtype.
        """
        if scales is None:
            return matmul(x, weight, accumulate)
        return (matmul(x, weight, jnp.float32) * scales).astype(accumulate or x.dtype)


def on_shards(
    matmul: Matmul,
    x: Float[Array, "*shape input_dim"],
    weight: Shaped[Array, "input_dim output_dim"],
    accumulate: DTypeLike | None,
    scales: Float[Array, " output_dim"] | None,
    axes: tuple[str | None, str | None] | None,
) -> Float[Array, "*shape output_dim"]:
    """`matmul` under `shard_map`, over all mesh axes that no enclosing `shard_map` handles.

    Each device multiplies its features of x by its shard of the matrix. If the outputs of the matrix are sharded, the
    result is, too. If the inputs are sharded, an all-reduce adds the partial sums, which are in float32 or integers.

    Args:
        accumulate, scales: see `Matmul`.
        axes: logical axes of the matrix. If they are None, or a dimension is not divisible by the number of its shards,
            XLA computes and partitions the product.
    """
    layout = active_layout()
    assert layout is not None
    inputs, outputs = entries = (None, None) if axes is None else layout.variable_spec(axes, weight.shape)
    if axes is None or any(size % layout.size_of(each) for size, each in zip(weight.shape, entries, strict=True)):
        return Matmul()(x, weight, accumulate, scales)
    summed, dtype = group_of(inputs), jnp.dtype(accumulate or x.dtype)
    partial = jnp.float32 if summed and jnp.issubdtype(dtype, jnp.floating) else dtype

    def local(x: jax.Array, weight: jax.Array, scales: jax.Array | None) -> jax.Array:
        with layout.inside(layout.automatic).active():
            return jax.lax.psum(matmul(x, weight, partial, scales), summed).astype(dtype)

    leading = (None,) * (x.ndim - 1)
    mapped = jax.shard_map(
        local,
        mesh=None if layout.manual else layout.mesh,  # inside another shard_map the mesh is that of the context
        axis_names=set(layout.automatic),
        in_specs=(PartitionSpec(*leading, inputs), PartitionSpec(inputs, outputs), PartitionSpec(outputs)),
        out_specs=PartitionSpec(*leading, outputs),
        check_vma=False,
    )
    return mapped(x, weight, None if scales is None else jnp.broadcast_to(scales, weight.shape[1:]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plain(Product):
    """`x @ weight` with a single matrix [in, out], as in a `Linear`.

    Attributes:
        matmul: the implementation. The gradients are products of XLA.
        axes: logical axes of the matrix; None: not known.
    """

    matmul: Matmul = dataclasses.field(default=Matmul(), metadata={"static": True})
    axes: tuple[str | None, str | None] | None = dataclasses.field(default=None, metadata={"static": True})

    def __call__(
        self,
        x: Float[Array, "*shape input_dim"],
        weight: Float[Array, "input_dim output_dim"],
        accumulate: DTypeLike | None = None,
    ) -> Float[Array, "*shape output_dim"]:
        return self._product(x, weight, accumulate, None)

    def scaled(
        self,
        x: Float[Array, "*shape input_dim"],
        weight: Shaped[Array, "input_dim output_dim"],
        scales: Float[Array, " output_dim"],
        dtype: DTypeLike,
    ) -> Float[Array, "*shape output_dim"]:
        return self._product(x, weight, dtype, scales)

    def input_gradient(
        self,
        y_bar: Shaped[Array, "*shape output_dim"],
        weight: Shaped[Array, "input_dim output_dim"],
        accumulate: DTypeLike | None = None,
    ) -> Shaped[Array, "*shape input_dim"]:
        return transposed_matmul(y_bar, weight, accumulate)

    def weight_gradient(
        self,
        x: Shaped[Array, "*shape input_dim"],
        y_bar: Shaped[Array, "*shape output_dim"],
        accumulate: DTypeLike | None = None,
    ) -> Shaped[Array, "input_dim output_dim"]:
        return _outer(x, y_bar, accumulate)

    def broadcast(self, values: Float[Array, " output_dim"]) -> Float[Array, " output_dim"]:
        return values

    def largest(self, values: Float[Array, "*shape output_dim"]) -> Float[Array, " output_dim"]:
        """-inf if there are no rows."""
        return values.max(range(values.ndim - 1), initial=-jnp.inf)

    def _product(self, x: jax.Array, weight: jax.Array, dtype: DTypeLike | None, scales: jax.Array | None) -> jax.Array:
        if not is_sharded() or not self.matmul.is_local(math.prod(x.shape[:-1])):
            return self.matmul(x, weight, dtype, scales)
        return on_shards(self.matmul, x, weight, dtype, scales, self.axes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transposed(Plain):
    """`x @ weight.T` with a single matrix [out, in]: an output head that is tied to the embedding.

    `matmul` has no effect, since it takes matrices [in, out].
    """

    scaled = Product.scaled

    def __call__(
        self,
        x: Float[Array, "*shape input_dim"],
        weight: Float[Array, "output_dim input_dim"],
        accumulate: DTypeLike | None = None,
    ) -> Float[Array, "*shape output_dim"]:
        return transposed_matmul(x, weight, accumulate)

    def input_gradient(
        self,
        y_bar: Shaped[Array, "*shape output_dim"],
        weight: Shaped[Array, "output_dim input_dim"],
        accumulate: DTypeLike | None = None,
    ) -> Shaped[Array, "*shape input_dim"]:
        return matmul(y_bar, weight, accumulate)

    def weight_gradient(
        self,
        x: Shaped[Array, "*shape input_dim"],
        y_bar: Shaped[Array, "*shape output_dim"],
        accumulate: DTypeLike | None = None,
    ) -> Shaped[Array, "output_dim input_dim"]:
        return _outer(y_bar, x, accumulate)
