"""Which plugin owns a module, as seen by the slot guard, `active` and mesh rules."""

import importlib

import pytest

from axcore.config import Config, ConfigError
from axcore.plugin import active, registry, target, use

CODE = """
import axcore as ax

class Part(ax.Config):
    pass

def attach(cfg):
    return cfg.set(part=Part())

def clear(cfg):
    return cfg.set(part=None)

def grow(cfg):
    return cfg.set(size=2)
"""
OFFERS = """
from axcore.plugin import Feature, MeshRule, hookimpl

@hookimpl
def axcore_features():
    return [Feature("{id}", "{code}:attach", "")]

@hookimpl
def axcore_mesh_rules():
    return [
        MeshRule("clear", "{code}:clear", "", "gpu-{id}-*"),
        MeshRule("grow", "{code}:grow", "", "tpu-{id}-*"),
    ]
"""


class Node(Config):
    part: Config | None = None
    size: int = 1


@pytest.fixture(params=["thrown_{id}", "thrown_acme.{id}"], ids=["top-level modules", "a shared namespace"])
def install(alone, request):
    """Installs a plugin whose hooks and code are in sibling modules. Returns the name of the code module."""
    (alone.folder / "thrown_acme").mkdir()

    def put(id):
        module = request.param.format(id=id) + "_plugin"
        code = module.replace("_plugin", "_code")
        alone.install(id, module=f"unused_{id}", entry=module)
        (alone.folder / f"{module.replace('.', '/')}.py").write_text(OFFERS.format(id=id, code=code))
        (alone.folder / f"{code.replace('.', '/')}.py").write_text(CODE)
        importlib.invalidate_caches()
        return code

    return put


def test_a_sibling_module_belongs_to_the_plugin_that_offers_it(install):
    for id in ("one", "two"):
        code = install(id)
        registry.cache_clear()
        assert registry().owner(code).id == registry().owner(f"{code}.deep").id == id
        assert registry().owner(code.replace("_code", "_plugin")).id == id
    assert registry().owner("thrown_acme.common") is None
    assert active(use("two")(Node())) == {"two": "ax-two 0.1"}
    with pytest.raises(ConfigError, match=r"part holds a node of one \(ax-one 0\.1\), which two \(ax-two 0\.1\) would"):
        use("two")(use("one")(Node()))


def test_a_mesh_rule_cannot_empty_a_slot_of_another_plugin(install):
    for id in ("one", "two"):
        install(id)
    cfg = use("one")(Node())
    with pytest.raises(ConfigError, match=r"target 'gpu-two-8', rule .*: part holds a node of one"):
        target("gpu-two-8")(cfg)
    assert target("gpu-one-8")(cfg).part is None
    assert target("tpu-two-8")(cfg) == cfg.set(size=2)


def test_offering_code_of_others_does_not_change_its_owner(alone):
    module = alone.feature("owner", target="thrown_ax_owner:hookimpl")
    alone.feature("borrower", names=("b", "c"), target=f"{module}:hookimpl")
    alone.feature("reuser", target="axcore.nn:use_kernels")
    assert registry().owner(module).id == "owner"
    assert registry().owner("axcore.nn.linear") is None


def test_a_package_shared_by_two_plugins_belongs_to_the_first(alone):
    for id in ("one", "two"):
        alone.install(id, distribution="ax-both", version=id, module=f"unused_{id}", entry=f"thrown_acme.{id}")
    assert registry().owner("thrown_acme.common").id == "one"
