"""Changing any field of any shipped config changes what the config does, or is refused. Each option of each feature is
read."""

import ast
import importlib
import inspect
import pathlib

import pytest

import axcore as ax
from axcore.config import Config, known_types, walk
from axcore.config.node import field_names, type_name
from axcore.config.tree import get
from axcore.nn import Linear
from axcore.plugin import Feature, registry, resolve

from . import layers, runs, steps
from .effects import Host, show

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ("src", "plugins/*/src", "plugins_kernels/*/src", "recipes/src")
NOT_SHIPPED = ("templates", "variants", "peers", "testing")
SHOWN_BY = {
    "axcore.parallel.mesh.Mesh.dcn": "tests/parallel/test_devices.py::test_dcn_chooses_the_axes_that_span_the_slices",
    "axcore_int8.int8.Int8.percentile": "plugins/axcore-int8/tests/test_static.py::test_the_percentile_is_measured",
}
"""CLASS.FIELD -> the test that shows its effect, where one change in this process cannot show it."""


def shipped():
    """The public config classes of the core, the plugins and the recipes."""
    modules = set()
    for folder in (folder for pattern in SOURCES for folder in ROOT.glob(pattern)):
        for file in folder.rglob("*.py"):
            inside = file.relative_to(folder).with_suffix("").parts
            if not {*NOT_SHIPPED, "config"} & set(inside) and "Config" in file.read_text():
                modules.add(importlib.import_module(".".join(inside).removesuffix(".__init__")).__name__)
    is_private = {name: name.rpartition(".")[2].startswith("_") for name in known_types()}
    return [cls for name, cls in known_types().items() if cls.__module__ in modules and not is_private[name]]


def hosts(folder, patch):
    return *layers.hosts(), *steps.hosts(), *runs.hosts(folder, patch)


def outermost(cls, classes):
    """The subclasses of a class that have no subclasses, or the class itself."""
    below = [each for each in classes if issubclass(each, cls)]
    return [each for each in below if not any(other is not each and issubclass(other, each) for other in below)]


def not_shown(classes, shown):
    """CLASS.FIELD of each field without an effect. A base class may leave a field to its subclasses, and to those of a
    test if none is shipped."""
    shown = shown.keys() | {
        (base, name)
        for cls, name in shown
        for base in cls.__mro__
        if cls not in classes and base in classes and outermost(base, classes) == [base]
    }
    for cls in classes:
        for name in field_names(cls):
            by_subclasses = all((each, name) in shown for each in outermost(cls, classes))
            if (cls, name) not in shown and not by_subclasses and f"{type_name(cls)}.{name}" not in SHOWN_BY:
                yield f"{type_name(cls)}.{name}"


def test_case_every_shipped_config_is_in_a_host(tmp_path, monkeypatch):
    found = {
        kind
        for host in hosts(tmp_path, monkeypatch)
        for _, node in walk(get(host.cfg, host.at))
        for kind in type(node).__mro__
        if issubclass(kind, Config)
    }
    classes = shipped()
    assert len(classes) > 100 and sum(len(field_names(cls)) for cls in classes) > 400
    missing = {type_name(each) for cls in classes for each in outermost(cls, classes) if field_names(each)}
    assert not missing - {type_name(cls) for cls in found}


@pytest.mark.slow
def test_case_every_config_field_has_an_effect(tmp_path, monkeypatch):
    shown, errors = {}, []
    for host in hosts(tmp_path, monkeypatch):
        errors += show(host, shown)
    assert not (found := list(not_shown(shipped(), shown))), "\n".join(found)
    assert not errors, "\n".join(errors)


def test_the_tests_named_here_exist():
    for test in SHOWN_BY.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text()


class Quiet(Linear):
    """Does not read `loudness`."""

    class Config(Linear.Config):
        loudness: ax.PositiveInt = 1
        volume: ax.PositiveInt = 1

    def __call__(self, x):
        cfg = self.config
        return super().__call__(x) * cfg.volume


def test_case_a_field_that_nobody_reads_is_found():
    shown = {}
    cfg = Quiet.Config(input_dim=4, output_dim=4)
    assert not list(show(Host(cfg, layers.traced(layers.x), fields=("loudness", "volume")), shown))
    assert shown == {(Quiet.Config, "volume"): "done"}


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
    return ax.select(cfg, layers.Attention)
