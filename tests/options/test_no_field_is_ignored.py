"""Each field of each shipped config is read by code that runs for the class, or a probe shows that it has an effect.
Each option of each feature is read.

`reads.py` proves from the syntax trees that a field is read. PROBES covers the fields that are read in another way.
"""

import ast
import importlib
import inspect
import pathlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import axcore as ax
from axcore.config import ConfigError, known_types
from axcore.config.node import field_names, type_name
from axcore.nn import Attention, Linear, ReferenceKernel
from axcore.nn.third_party import WIDTHS
from axcore.numerics import Numerics
from axcore.plugin import Feature, registry, resolve
from axcore.train import Callback
from axcore.train.callbacks.group import Callbacks

from .reads import reads

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ("src", "plugins/*/src", "plugins_kernels/*/src", "recipes/src")
NOT_SHIPPED = ("templates", "variants", "peers", "testing")


def modules():
    """The modules of the core, the plugins and the recipes that may contain configs or read them."""
    for folder in (folder for pattern in SOURCES for folder in ROOT.glob(pattern)):
        for file in folder.rglob("*.py"):
            inside = file.relative_to(folder).with_suffix("").parts
            if not {*NOT_SHIPPED, "config"} & set(inside) and (
                "Config" in file.read_text() or "cfg" in file.read_text()
            ):
                yield importlib.import_module(".".join(inside).removesuffix(".__init__")).__name__


def unread(classes, where):
    """CLASS.FIELD of each field that is neither read nor in PROBES. A base may leave a field to its subclasses."""
    read = {cls: reads(cls, where) for cls in classes}
    for cls in classes:
        below = [each for each in classes if each is not cls and issubclass(each, cls)]
        for field in field_names(cls):
            probed = any(f"{type_name(base)}.{field}" in PROBES for base in cls.__mro__ if issubclass(base, ax.Config))
            if not probed and field not in read[cls] and not (below and all(field in read[each] for each in below)):
                yield f"{type_name(cls)}.{field}"


def attention(**fields):
    return Attention.Config(input_dim=8, num_heads=2, num_kv_heads=1, **fields).build(rngs=ax.Rngs(0))


def linear(**fields):
    """The program of a linear layer and the axes of its weight."""
    layer = Linear.Config(input_dim=4, output_dim=4, axes=("embed", "mlp"), **fields).build(rngs=ax.Rngs(0))
    program = jax.make_jaxpr(lambda x: ax.invoke(layer, x)[0])(jnp.ones((2, 4)))
    return str(program), str(layer.weight[...].dtype)


def stock(width):
    def probe(value):
        cfg = ax.stock(nnx.RMSNorm, widths={"num_features": width})
        return cfg.set(**{width: value}).build(rngs=ax.Rngs(0)).module.num_features

    return probe


class Told(Callback):
    """Fails when a checkpoint is written."""

    class Config(Callback.Config):
        pass

    def checkpoint(self, step):
        raise RuntimeError("failed on purpose")


def order_of_callbacks(value):
    return list(Callbacks({"a": Told.Config(order=value), "b": Told.Config(order=1)})._callbacks)


def failure(value):
    group = Callbacks({"told": Told.Config(on_error=value)})
    group.checkpoint(1)
    return group.failure is None


DTYPE = "axcore.module.layer.DTypes"
NUMERICS = "axcore.numerics.base.Numerics"
CALLBACK = "axcore.train.callbacks.base.Callback"
PROBES = {
    "axcore.module.layer.Layer.tags": (
        lambda value: len([*ax.select(Attention.Config(tags=value, query=None), ax.tagged("a"))]),
        [("a",), ("b",)],
    ),
    "axcore.nn.attention.kernel.AttentionKernel.head_dim": (
        lambda value: attention(kernel=ReferenceKernel.Config(head_dim=value)).kernel.config.head_dim,
        [4, 5],  # of a parent with 4
    ),
    **{
        f"{DTYPE}.{name}": (lambda value, name=name: linear(dtypes=ax.DTypes(**{name: value})), ["float32", "bfloat16"])
        for name in field_names(ax.DTypes)
    },
    f"{NUMERICS}.shape": (lambda value: linear(numerics=Numerics.Config(shape=value)), [(4, 4), (4, 5)]),
    f"{NUMERICS}.axes": (
        lambda value: linear(numerics=Numerics.Config(axes=value)),
        [("embed", "mlp"), ("mlp", "embed")],
    ),
    f"{NUMERICS}.input_axis": (lambda value: linear(numerics=Numerics.Config(input_axis=value)), [-2, -1]),
    **{f"axcore.nn.third_party.Stock.{width}": (stock(width), [3, 5]) for width in WIDTHS},
    f"{CALLBACK}.order": (order_of_callbacks, [0, 2]),
    f"{CALLBACK}.on_error": (failure, ["stop", "disable"]),
}
"""CLASS.FIELD -> a function of the field's value and two values for which it differs, or of which one is refused."""


def outcome(probe, value):
    try:
        return str(probe(value))
    except ConfigError as error:
        return f"refused: {error}"


def test_case_every_config_field_is_read():
    where = sorted(modules())
    shipped = [cls for cls in known_types().values() if cls.__module__ in where]
    assert len(shipped) > 100 and sum(len(field_names(cls)) for cls in shipped) > 400
    found = list(unread(shipped, where))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("field", PROBES)
def test_case_a_field_that_is_read_elsewhere_has_an_effect(field):
    probe, (one, other) = PROBES[field]
    assert outcome(probe, one) != outcome(probe, other)


def unused(function):
    """The parameters that the body of a function does not read."""
    read = {each.id for each in ast.walk(ast.parse(inspect.getsource(function))) if isinstance(each, ast.Name)}
    return inspect.signature(function).parameters.keys() - read


def test_case_every_option_of_a_feature_is_read():
    features = {offer.name: resolve(plugin, offer) for plugin, offer in registry().offers(Feature)}
    assert len(features) > 10
    assert not {name: left for name, function in features.items() if (left := unused(function))}


def test_case_an_option_that_nobody_reads_is_found():
    assert unused(attention_of) == {"scale"}


def attention_of(cfg, scale=1.0):
    return ax.select(cfg, Attention)


class Quiet(Linear):
    """Does not read `loudness`."""

    class Config(Linear.Config):
        loudness: ax.PositiveInt = 1
        volume: ax.PositiveInt = 1

    def __call__(self, x):
        cfg = self.config
        return super().__call__(x) * cfg.volume


class Deaf(ReferenceKernel):
    """Replaces the method that reads `chunk`."""

    def __call__(self, inputs):
        return inputs.q, None


def test_case_a_field_that_nobody_reads_is_found():
    found = list(unread([Quiet.Config, Deaf.Config], [__name__]))
    assert found == [f"{type_name(Quiet.Config)}.loudness", f"{type_name(Deaf.Config)}.chunk"]
