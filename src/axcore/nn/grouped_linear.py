"""Linear layers with one weight per group of rows, such as one per expert."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from axcore.config import REQUIRED, ConfigError, PositiveInt, has_field
from axcore.module import Layer, Rngs, method
from axcore.nn.grouped_matmul import Batched, Grouped
from axcore.nn.initializers import FanIn, ForEach, Initializer, Zeros
from axcore.nn.linear import Linear
from axcore.nn.weighted import Weighted
from axcore.numerics import Product


class GroupedLinear(Weighted):
    """A linear map for each of `groups` groups of rows: a weight [group, in, out] and a bias [group, out].

    Each group is initialized like a `Linear`, with its own fan-in. The slots are those of `Linear`. The config of an
    adapter must declare the field `groups`; its `axes` have three names.
    """

    class Config(Weighted.Config):
        groups: PositiveInt = REQUIRED
        input_dim: PositiveInt = REQUIRED
        output_dim: PositiveInt = REQUIRED
        use_bias: bool = False
        init: Initializer = FanIn()
        bias_init: Initializer = Zeros()
        axes: tuple[str | None, str | None, str | None] | None = None
        """Logical axes of the weight; None: the parent's, or replicated."""
        adapter: Layer.Config | None = None

        @classmethod
        def of(cls, linear: Linear.Config) -> GroupedLinear.Config:
            """The config of a layer whose groups are each like `linear`. The parent sets `groups` and `axes`.

            Raises:
                ConfigError: `linear.axes` is set; it has no name for the group axis.
            """
            if linear.axes is not None:
                raise ConfigError(
                    f"axes={linear.axes}: grouped weights have three axes, which the parent sets; set axes to None"
                )
            names = (
                "dtypes",
                "tags",
                "numerics",
                "input_dim",
                "output_dim",
                "use_bias",
                "init",
                "bias_init",
                "adapter",
            )
            return cls(**{name: getattr(linear, name) for name in names})

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        if cfg.adapter is not None and not has_field(cfg.adapter, "groups"):
            raise ConfigError(
                f"adapter={cfg.adapter!r} has no field 'groups', so it does not support grouped weights; exclude these "
                f"layers with where="
            )
        axes = cfg.axes or (None, None, None)
        shape = (cfg.groups, cfg.input_dim, cfg.output_dim)
        self.make_weight(shape, ForEach(init=cfg.init), rngs, axes=axes)
        self.bias = nnx.data(None)
        if cfg.use_bias:
            bias_axes = (axes[0], axes[2])
            self.bias = self.param("bias", (shape[0], shape[2]), ForEach(init=cfg.bias_init), rngs, axes=bias_axes)
        widths = {"groups": cfg.groups, "input_dim": cfg.input_dim, "output_dim": cfg.output_dim, "axes": axes}
        self.adapter = self.child("adapter", cfg.adapter, rngs, **widths)

    @property
    def plain(self) -> bool:
        """Whether the layer only multiplies by its float weight, without numerics and adapter."""
        return self.numerics is None and self.adapter is None

    @method
    def grouped(
        self, x: Float[Array, "rows input_dim"], groups: Grouped, scale: Float[Array, " rows"] | None = None
    ) -> Float[Array, "rows output_dim"]:
        """Maps each row with the weight of its group.

        Args:
            scale: a factor of each row of the result. If the layer is plain, x is scaled instead, so that the gradient
                of the scale needs x and its gradient, but not the result.
        """
        if scale is None:
            return self._mapped(x, groups)
        if not self.plain:
            y = self._mapped(x, groups)
            return y * scale[:, None].astype(y.dtype)
        types = self.dtypes
        scale = scale[:, None].astype(types.compute)
        y = self.multiply(x.astype(types.compute) * scale, groups)
        if self.bias is not None:
            y = y + groups.broadcast(self.bias[...].astype(y.dtype)) * scale.astype(y.dtype)
        return y.astype(types.output or types.compute)

    @method
    def finished(self, y: Float[Array, "rows output_dim"], groups: Grouped) -> Float[Array, "rows output_dim"]:
        """The result of a plain layer, from the product of its input and weight."""
        return self._finished(y, groups)

    @method
    def batched(self, x: Float[Array, "group rows input_dim"]) -> Float[Array, "group rows output_dim"]:
        """Maps the rows of each group with its weight. All groups have the same number of rows."""
        return self._mapped(x, Batched())

    def _mapped(self, x: jax.Array, product: Product) -> jax.Array:
        types = self.dtypes
        x = x.astype(types.compute)
        y = self.multiply(x, product)
        if self.adapter is not None:
            y = self.adapter(x, y, self.base_matrix, product)
        return self._finished(y, product)

    def _finished(self, y: jax.Array, product: Product) -> jax.Array:
        if self.bias is not None:
            y = y + product.broadcast(self.bias[...].astype(y.dtype))
        return y.astype(self.dtypes.output or self.dtypes.compute)

    @method
    def matrix(self) -> Float[Array, "group input_dim output_dim"]:
        """The effective matrices, including numerics and adapter."""
        weight = self.base_matrix
        if self.adapter is None:
            return weight
        eye = jnp.eye(self.config.input_dim, dtype=self.dtypes.compute)
        return self.adapter(jnp.broadcast_to(eye, (weight.shape[0], *eye.shape)), weight, weight, Batched())


def grouped_each(
    layers: Sequence[GroupedLinear], x: Float[Array, "rows input_dim"], groups: Grouped
) -> list[Float[Array, "rows output_dim"]]:
    """`layer.grouped(x, groups)` for each layer. Plain layers of equal sizes and dtypes are computed together, which
    lets the grouped product add up their gradients of x."""
    forms = {(layer.float_weight.shape, layer.dtypes) if layer.plain else None for layer in layers}
    if len(layers) < 2 or len(forms) > 1 or None in forms:
        return [layer.grouped(x, groups) for layer in layers]
    types = layers[0].dtypes
    products = groups.each(x.astype(types.compute), [layer.float_weight for layer in layers], types.accumulate)
    return [layer.finished(y, groups) for layer, y in zip(layers, products, strict=True)]
