"""Layer: an `nnx.Module` that is built from a config and knows, while it is called, where it stands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from axcore.config import Codec, Config as Node, ConfigError, Configurable, MissingError, has_field, register_codec
from axcore.config.node import fields
from axcore.module.collections import Kind, Reduce
from axcore.module.context import Frame, current, entered
from axcore.module.rngs import Rngs

Initializer = Callable[[jax.Array, tuple[int, ...], DTypeLike], jax.Array]

_name_of = lambda dtype: dtype.name  # noqa: E731
register_codec(np.dtype, Codec("dtype", _name_of, lambda name: np.dtype(getattr(ml_dtypes, name, name)), _name_of))


class DTypes(Node):
    """Which number types a layer uses. What is None is as in the parent."""

    param: DTypeLike | None = None
    """Parameters are stored in this; float32 where nobody says."""
    compute: DTypeLike | None = None
    """Activations and matrix products; float32 where nobody says."""
    accumulate: DTypeLike | None = None
    """Sums inside matrix products; the backend's choice where nobody says."""
    output: DTypeLike | None = None
    """What a linear map returns; the compute type where nobody says."""

    def __post_init__(self) -> None:
        for name, value in fields(self):
            try:
                object.__setattr__(self, name, None if value is None else np.dtype(value))
            except TypeError:
                raise ConfigError(f"DTypes.{name}: {value!r} is no number type; as in bfloat16") from None

    def over(self, parent: DTypes) -> DTypes:
        """These types, and the parent's where this says nothing."""
        return DTypes(**{name: mine if mine is not None else getattr(parent, name) for name, mine in fields(self)})


DEFAULT_DTYPES = DTypes(param=jnp.float32, compute=jnp.float32)


class BuildError(ConfigError):
    """A layer could not be built. The message begins with the config path."""


def method[F: Callable[..., Any]](fn: F) -> F:
    """Marks a method other than `__call__` as an entry point: it runs in its layer's frame."""

    @functools.wraps(fn)
    def call(self: Layer, *args: Any, **kwargs: Any) -> Any:
        with entered(self) as frame:
            result = fn(self, *args, **kwargs)
            frame.add_result(result)
            return result

    return call  # type: ignore[return-value]


class Layer(nnx.Module, Configurable):
    """Base of every axcore layer.

    A subclass nests a `Config`, takes `(cfg, *, rngs)` in its constructor and makes its children with `child` and its
    parameters with `param`. Inside `__call__`, and inside methods marked with `axcore.method`, it may use `rng`,
    `training`, `add_summary` and `add_loss`; no signature threads them.

    Attributes:
        config: the node that it was built from, widths filled in.
        dtypes: the number types in force here.
        activation_axes: logical axes of activations that are neither in `axcore.parallel.LOGICAL_AXES` nor an axis of
            a parameter. Declaring them here lets mesh rules map them.
    """

    activation_axes: ClassVar[tuple[str, ...]] = ()

    class Config(Node):
        """Fields that every layer has."""

        dtypes: DTypes | None = None
        """None: the parent's."""
        tags: tuple[str, ...] = ()
        """Names that `tagged` selects by."""

    config: Config
    dtypes: DTypes

    def __init__(self, cfg: Config, *, rngs: Rngs):
        """A layer without parameters and children needs no constructor of its own."""
        self.config = cfg
        self.dtypes = (cfg.dtypes or DTypes()).over(DEFAULT_DTYPES)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__call__" in cls.__dict__:
            cls.__call__ = method(cls.__call__)  # type: ignore[method-assign]
        if "__init__" in cls.__dict__:
            cls.__init__ = _with_config(cls.__init__)  # type: ignore[method-assign]

    def child(self, name: str, cfg: Any, rngs: Rngs, **widths: Any) -> Any:
        """Builds a child from its slot. An empty slot stays empty and can be filled later.

        Args:
            name: the attribute that the caller stores it under; it becomes part of the path.
            cfg: the child's config, or None.
            rngs: this layer's rngs.
            widths: what the parent knows (`input_dim=...`). The child takes those that it declares as fields; a field
                that already holds something else is an error.

        Raises:
            BuildError: the child cannot be built so; the message begins with its config path.
        """
        if cfg is None:
            return nnx.data(None)
        return self.build_child(cfg, rngs.at(name), **widths)

    def children(self, name: str, cfgs: Iterable[Any], rngs: Rngs, **widths: Any) -> nnx.List[Any]:
        """`child` for each config of a tuple; the path of the first is `name.0`."""
        return nnx.List([self.build_child(cfg, rngs.at(name).at(str(i)), **widths) for i, cfg in enumerate(cfgs)])

    def build_child(self, cfg: Any, rngs: Rngs, **widths: Any) -> Any:
        """`child` for one that has its own rngs already, such as a layer of a stack."""
        try:
            cfg = cfg.fill(**{name: value for name, value in widths.items() if has_field(cfg, name)})
            if isinstance(cfg, Layer.Config):
                cfg = cfg._with({"dtypes": (cfg.dtypes or DTypes()).over(self.dtypes)})
            return cfg.build(rngs=rngs)
        except BuildError:
            raise
        except MissingError as error:
            raise BuildError(str(error.below(rngs.path))) from None
        except ConfigError as error:
            raise BuildError(f"{rngs.path}: {error}") from error
        except Exception as error:
            error.add_note(f"while building {rngs.path}")
            raise

    def param(
        self, name: str, shape: tuple[int, ...], init: Initializer, rngs: Rngs, *, axes: tuple[str | None, ...]
    ) -> nnx.Param[jax.Array]:
        """A parameter of `shape` in the layer's parameter dtype.

        Args:
            axes: the logical name of each dimension ("embed", "mlp", ...); parallelism maps them to the mesh.
        """
        where = rngs.at(name).path
        if len(axes) != len(shape):
            raise BuildError(f"{where}: axes {axes} must name the {len(shape)} dimensions of shape {shape}")
        value = init(rngs.at(name).key, shape, self.dtypes.param or jnp.float32)
        if value.shape != shape:
            raise BuildError(f"{where}: the initializer {init!r} gave shape {value.shape}, not {shape}")
        return nnx.Param(value, axes=axes)

    @property
    def frame(self) -> Frame:
        return current()

    @property
    def training(self) -> bool:
        """Whether this call is part of a training step."""
        return self.frame.training

    def rng(self, stream: str) -> jax.Array:
        """A key of the named stream; it derives from the layer's path and the step's key."""
        return self.frame.rng(stream)

    def add_summary(self, name: str, value: Any, reduce: Reduce = Reduce.MEAN) -> None:
        """Reports a scalar under `path.name`; `reduce` says how several of it become one."""
        self.frame.add_summary(name, value, reduce)

    def add_histogram(self, name: str, values: Any) -> None:
        """Reports how values of any shape are distributed, under `path.name`."""
        self.frame.add_summary(name, values, Reduce.LAST, Kind.HISTOGRAM)

    def add_image(self, name: str, image: Any) -> None:
        """Reports an image, [height, width, channels] from 0 to 1, under `path.name`."""
        self.frame.add_summary(name, image, Reduce.LAST, Kind.IMAGE)

    def add_output(self, name: str, value: Any) -> None:
        """Hands out a value for inspection under `path.name`, if the caller of `invoke` captures it."""
        self.frame.add_output(name, value)

    def share(self, name: str, value: Any) -> None:
        """Hands a value (a pytree of arrays) to the layers that are called later, until one shares the name anew."""
        self.frame.shared[name] = value

    def shared(self, name: str) -> Any:
        """The last value shared under this name. Values shared inside a transform other than remat stay inside it.

        Raises:
            ContextError: no layer before this one shared it.
        """
        return self.frame.take(name)

    def add_loss(self, name: str, total: Any, count: Any, weight: float = 1.0) -> None:
        """Adds `weight * total / count` to the training objective.

        Args:
            total: a scalar, the sum of the loss over tokens, rows or other units.
            count: a scalar, the number of those units. It must not depend on parameters. Totals and counts of
                microbatches are added before the division. A loss that is not such a sum uses `count=1`, and is
                averaged over microbatches.
            weight: a Python number.
        """
        self.frame.add_loss(name, total, count, weight)


def _with_config(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that first stores the config, so that no subclass has to remember to."""

    @functools.wraps(init)
    def construct(self: Layer, cfg: Any, *args: Any, **kwargs: Any) -> None:
        self.config = cfg
        self.dtypes = (cfg.dtypes or DTypes()).over(DEFAULT_DTYPES)
        init(self, cfg, *args, **kwargs)

    return construct
