"""`Layer`, an `nnx.Module` that is built from a config and called in an invocation context."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Concatenate

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, PRNGKeyArray, PyTree, Shaped

from axcore.config import (
    Codec,
    Config as BaseConfig,
    ConfigError,
    Configurable,
    MissingError,
    has_field,
    register_codec,
)
from axcore.config.node import fields
from axcore.module.collections import Kind, Reduce
from axcore.module.context import Frame, current, entered
from axcore.module.rngs import Rngs

Initializer = Callable[[jax.Array, tuple[int, ...], DTypeLike], jax.Array]


def _dtype_name(dtype: np.dtype) -> str:
    return dtype.name


def _read_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


register_codec(np.dtype, Codec("dtype", _dtype_name, _read_dtype, _dtype_name))


def float_dtype(value: DTypeLike, name: str) -> np.dtype:
    """The dtype that a field denotes.

    Raises:
        ConfigError: The value of the field `name` is not a floating-point dtype.
    """
    try:
        dtype = np.dtype(value)
    except TypeError:
        raise ConfigError(f"{name}: {value!r} is not a dtype such as 'bfloat16'") from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ConfigError(f"{name} must be a floating-point dtype such as 'bfloat16', not {dtype.name}")
    return dtype


class DTypes(BaseConfig):
    """The dtypes of a layer. A field that is None takes the value of the parent layer."""

    param: DTypeLike | None = None
    """The dtype of parameters; float32 by default."""
    compute: DTypeLike | None = None
    """The dtype of activations and matrix products; float32 by default."""
    accumulate: DTypeLike | None = None
    """The dtype of sums inside matrix products; chosen by the backend by default."""
    output: DTypeLike | None = None
    """The dtype of the results of linear maps; the compute dtype by default."""

    def __post_init__(self) -> None:
        for name, value in fields(self):
            object.__setattr__(self, name, None if value is None else float_dtype(value, f"DTypes.{name}"))

    def over(self, parent: DTypes) -> DTypes:
        """A copy in which fields that are None take the values of `parent`."""
        return DTypes(**{name: mine if mine is not None else getattr(parent, name) for name, mine in fields(self)})


DEFAULT_DTYPES = DTypes(param=jnp.float32, compute=jnp.float32)


class BuildError(ConfigError):
    """A layer could not be built. The message begins with the config path."""


def method[L: Layer, **P, R](fn: Callable[Concatenate[L, P], R]) -> Callable[Concatenate[L, P], R]:
    """A decorator for entry points other than `__call__`. The method runs in the frame of its layer."""

    @functools.wraps(fn)
    def call(self: L, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with entered(self) as frame:
            result = fn(self, *args, **kwargs)
            frame.add_result(result)
            return result

    return call


def _with_config[L: Layer](init: Callable[Concatenate[L, Any, ...], None]) -> Callable[Concatenate[L, Any, ...], None]:
    """A constructor that stores the config before it calls `init`, whose rngs have no used keys.

    It also accepts `nnx.Rngs`.
    """

    @functools.wraps(init)
    def construct(self: L, cfg: Any, *args: object, **kwargs: Any) -> None:  # Any: the config of a subclass
        outermost = "config" not in vars(self)  # not called by the constructor of a subclass
        self.config = cfg
        self.dtypes = (cfg.dtypes or DTypes()).over(DEFAULT_DTYPES)
        given = kwargs.get("rngs")
        if isinstance(given, nnx.Rngs):
            kwargs["rngs"] = Rngs(given.params())
            if "dropout" in given or "default" in given:
                self.rngs = given["dropout"].fork()
        elif outermost and isinstance(given, Rngs):
            kwargs["rngs"] = given.for_constructor()
        init(self, cfg, *args, **kwargs)

    return construct


class Layer(nnx.Module, Configurable):
    """Base of every axcore layer.

    A subclass nests a `Config`, takes `(cfg, *, rngs)` in its constructor, and creates its children with `child` and
    its parameters with `param`. `__call__` and methods decorated with `axcore.method` may use `rng`, `training`,
    `add_summary` and `add_loss` without taking them as arguments.

    Attributes:
        config: The node that the layer was built from, completed by its parent.
        dtypes: The dtypes of this layer.
        activation_axes: Logical axes of activations that are neither in `axcore.parallel.LOGICAL_AXES` nor an axis of
            a parameter. Mesh rules may map the axes declared here.
        uses_dtypes: Whether the layer or its children compute anything in `dtypes`. If False, a config that sets them
            is refused.
    """

    activation_axes: ClassVar[tuple[str, ...]] = ()
    uses_dtypes: ClassVar[bool] = True

    class Config(BaseConfig):
        """The fields that every layer has."""

        dtypes: DTypes | None = None
        """The dtypes of this layer. None uses those of the parent."""
        tags: tuple[str, ...] = ()
        """Names by which `tagged` selects the node."""

    config: Config
    dtypes: DTypes
    deterministic: bool | None = None
    """The mode of direct calls, outside of `invoke`: False after `train()`, True after `eval()`. None raises an error
    in layers that need the mode."""
    rngs: nnx.RngStream
    """The random numbers of direct calls. Only a layer that is built from `nnx.Rngs` has this attribute."""

    @_with_config
    def __init__(self, cfg: Config, *, rngs: Rngs):
        """Stores the config. A layer without parameters and children needs no other constructor."""

    def __init_subclass__(cls, **kwargs: bool) -> None:
        super().__init_subclass__(**kwargs)
        if "__call__" in cls.__dict__:
            cls.__call__ = method(cls.__call__)  # type: ignore[assignment, method-assign]
        if "__init__" in cls.__dict__:
            cls.__init__ = _with_config(cls.__init__)  # type: ignore[method-assign]

    def child(self, name: str, cfg: BaseConfig | None, rngs: Rngs, **widths: object) -> Any:  # Any: what `cfg` builds
        """Builds a child from its config. The child is None if `cfg` is None.

        Args:
            name: The attribute under which the caller stores the child. It becomes part of the path.
            cfg: The config of the child, or None.
            rngs: The rngs of this layer.
            widths: Values that the parent provides, such as `input_dim`. Fields that the child does not declare are
                skipped.

        Raises:
            BuildError: The child cannot be built, or a field differs from the value that the parent provides. The
                message begins with the config path.
        """
        if cfg is None:
            return nnx.data(None)
        return self.build_child(cfg, rngs.at(name), **widths)

    def children(self, name: str, cfgs: Iterable[BaseConfig], rngs: Rngs, **widths: object) -> nnx.List[Any]:
        """Builds a child from each config of a tuple. The path of the first child is `name.0`."""
        return nnx.List([self.build_child(cfg, rngs.at(name).at(str(i)), **widths) for i, cfg in enumerate(cfgs)])

    def build_child(self, cfg: BaseConfig, rngs: Rngs, **widths: object) -> Any:  # Any: what `cfg` builds
        """Like `child`, but takes the rngs of the child, such as those of one layer of a stack."""
        try:
            rngs.use()
        except ConfigError as error:
            raise BuildError(str(error)) from None
        try:
            cfg = cfg.fill(**{name: value for name, value in widths.items() if has_field(cfg, name)})
            if isinstance(cfg, Layer.Config):
                if cfg.dtypes is not None and cfg.target is not None and not cfg.target.uses_dtypes:
                    raise ConfigError(
                        f"dtypes={cfg.dtypes!r} has no effect on {cfg.target.__name__}, whose dtypes follow from its "
                        f"inputs or its own arguments. Remove it"
                    )
                cfg = cfg._with({"dtypes": (cfg.dtypes or DTypes()).over(self.dtypes)})
            return cfg.build(rngs=rngs.fresh())
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
        """A parameter of `shape` in the parameter dtype of the layer.

        Args:
            axes: The logical axis of each dimension ("embed", "mlp", ...), which mesh rules map to mesh axes.
        """
        where = rngs.at(name).path
        if len(axes) != len(shape):
            raise BuildError(f"{where}: axes {axes} do not match the {len(shape)} dimensions of shape {shape}")
        value = init(rngs.at(name).use().key, shape, self.dtypes.param or jnp.float32)
        if value.shape != shape:
            raise BuildError(f"{where}: the initializer {init!r} returned shape {value.shape}, not {shape}")
        return nnx.Param(value, axes=axes)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets the mode of direct calls. `nnx.view` calls it on a copy.

        Args:
            deterministic: True for evaluation, False for training.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    @property
    def frame(self) -> Frame:
        """The frame of the current call."""
        return current()

    @property
    def training(self) -> bool:
        """Whether this call is part of a training step.

        Raises:
            ContextError: The layer was called outside of `invoke`, without `train()` or `eval()` before.
        """
        return self.frame.training

    def rng(self, stream: str) -> PRNGKeyArray:
        """A PRNG key of the named stream, derived from the path of the layer and the key passed to `invoke`."""
        return self.frame.rng(stream)

    def add_summary(self, name: str, value: ArrayLike, reduce: Reduce = Reduce.MEAN) -> None:
        """Reports a scalar under `path.name`. `reduce` combines the values of examples, devices, microbatches and
        blocks of rows."""
        self.frame.add_summary(name, value, reduce)

    def add_histogram(self, name: str, values: Shaped[Array, ...]) -> None:
        """Reports the distribution of values under `path.name`."""
        self.frame.add_summary(name, values, Reduce.LAST, Kind.HISTOGRAM)

    def add_image(self, name: str, image: Shaped[Array, "height width channels"]) -> None:
        """Reports an image with values from 0 to 1 under `path.name`."""
        self.frame.add_summary(name, image, Reduce.LAST, Kind.IMAGE)

    def add_output(self, name: str, value: PyTree) -> None:
        """Reports a value for inspection under `path.name`, if the caller of `invoke` captures it."""
        self.frame.add_output(name, value)

    def share(self, name: str, value: PyTree) -> None:
        """Shares arrays and numbers with the layers that are called later, until another layer shares the same name.
        Numbers become arrays.

        Raises:
            ContextError: The value contains anything else, such as a string.
        """
        self.frame.give(name, value)

    def shared(self, name: str) -> PyTree:
        """The last value shared under this name. Values shared inside transforms other than remat and scan stay there.

        Raises:
            ContextError: No earlier layer shares this name.
        """
        return self.frame.take(name)

    def add_loss(self, name: str, total: ArrayLike, count: ArrayLike, weight: float = 1.0) -> None:
        """Adds `weight * total / count` to the training objective.

        Args:
            total: A scalar, the sum of the loss over tokens, rows or other units.
            count: A scalar, the number of units. It must not depend on parameters. Totals and counts of microbatches
                are added before the division. For a loss that is not a sum over units, pass 1; the loss is then
                averaged over microbatches.
            weight: A Python number.
        """
        self.frame.add_loss(name, total, count, weight)
