"""Plugin discovery: each way in which a plugin can fail, without an effect on other plugins."""

import importlib.metadata
import pathlib
import re

import pytest

from axcore.plugin import (
    API_VERSION,
    Accelerator,
    Feature,
    KVCacheOffer,
    MeshRule,
    PluginError,
    Recipe,
    State,
    host,
    recipe,
    registry,
    target,
    use,
)

ROOT = pathlib.Path(__file__).parents[2]
GOOD = "@hookimpl\ndef axcore_features():\n    return [Feature('good', 'math:sqrt', 'Good.')]\n"


def hook(body, name="axcore_features", arguments="", mark="@hookimpl\n"):
    return f"{mark}def {name}({arguments}):\n    {body}\n"


BROKEN = {
    "import error": ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
    "syntax error": ("def broken(:", "SyntaxError"),
    "exception at import": ("1 / 0", "ZeroDivisionError"),
    "exit at import": ("raise SystemExit(3)", "SystemExit"),
    "unknown hook": (hook("return []", name="axcore_wings"), "axcore_wings"),
    "misspelt hook": (hook("return []", name="axcore_feature"), "axcore_feature"),
    "misspelt function without a mark": (hook("return []", name="axcore_feature", mark=""), "axcore_feature"),
    "hook without a mark": (hook("return [Feature('x', 'a:b', '')]", mark=""), "hookimpl"),
    "bad argument names": (hook("return []", arguments="registry"), "registry"),
    "exception inside a hook": (hook("raise KeyError('deep')"), "deep"),
    "hook that returns None": (hook("pass"), "axcore_features must return a list of Feature, not NoneType"),
    "hook that returns one offer": (hook("return Feature('x', 'a:b', '')"), "axcore_features"),
    "hook that returns text": (hook("return 'rope'"), "axcore_features"),
    "hook that returns classes": (hook("return [Feature]"), "axcore_features"),
    "hook that returns another kind of offer": (hook("return [Recipe('x', 'a:b', '')]"), "axcore_features"),
    "offer without target": (hook("return [Feature('x', 'a.b', '')]"), "'a.b' of 'x' is not 'module:attribute'"),
    "offer with an invalid name": (
        hook("return [Feature('a b', 'a:b', '')]"),
        "the name 'a b' may contain only",
    ),
    "offer without a name": (hook("return [Feature('', 'a:b', '')]"), "the name '' may contain only"),
    "offer with a field that is not a string": (
        hook("return [Feature('x', 'a:b', 3)]"),
        "every field of an offer must be a string",
    ),
    "offer with wrong fields": (hook("return [Feature('x')]"), "target"),
    "good hook beside a bad one": (GOOD + hook("return []", name="axcore_recipes", arguments="wrong"), "wrong"),
    "good hook beside an unknown one": (GOOD + hook("return []", name="axcore_wings"), "axcore_wings"),
    "misspelt hook, with the right one": (hook("return []", name="axcore_feature"), "Did you mean 'axcore_features'?"),
    "api that is not an integer": ("axcore_api = '1'\n" + GOOD, "axcore_api must be an integer, not str"),
    "target without an attribute": (hook("return [Feature('x', 'a:', '')]"), "'a:' of 'x' is not 'module:attribute'"),
    "endless repr": (hook("return ['x' * 10**6]"), "not of str"),
    "generator that raises midway": (hook("yield Feature('x', 'a:b', ''); 1 / 0"), "ZeroDivisionError"),
}


def test_a_good_plugin_is_loaded_with_its_distribution_and_offers(site):
    module = site.install("good", GOOD, distribution="ax-good-things", version="1.2")
    plugin = site.registry().plugins["good"]
    assert (plugin.id, plugin.distribution, plugin.version) == ("good", "ax-good-things", "1.2")
    assert (plugin.module, plugin.package) == (module, module)
    assert (plugin.state, plugin.detail) == (State.LOADED, "")
    assert plugin.offers == (Feature("good", "math:sqrt", "Good."),)
    assert str(plugin) == "ax-good-things 1.2"


def test_offers_are_found_by_kind_and_name(site):
    site.install(
        "all",
        GOOD
        + hook("return [Recipe('tiny', 'a:b', '')]", name="axcore_recipes")
        + hook("return [KVCacheOffer('ring', 'a:b', '')]", name="axcore_kv_caches")
        + hook("return [MeshRule('h100', 'a:b', '', 'gpu-h100-*')]", name="axcore_mesh_rules"),
    )
    registry = site.registry()
    assert registry.find(Recipe, "tiny")[1].target == "a:b"
    assert registry.find(KVCacheOffer, "ring")[0].id == "all"
    rule = registry.find(MeshRule, "h100")[1]
    assert not rule.why_not(Accelerator.parse("gpu-h100-8"), "")
    assert "gpu-h100-*" in rule.why_not(Accelerator.parse("gpu-h200-8"), "")
    assert registry.find(Feature, "tiny") is None
    assert [offer.name for _, offer in registry.offers(Feature)] == ["good"]


def test_discovery_does_not_import_the_target_of_an_offer(site):
    site.feature("lazy", target="no_such_module_anywhere:thing")
    assert site.registry().plugins["lazy"].state is State.LOADED


@pytest.mark.parametrize(("body", "told"), BROKEN.values(), ids=BROKEN.keys())
def test_case_a_broken_plugin_fails_alone_and_is_named(site, body, told):
    site.install("aaa", GOOD.replace("'good'", "'first'"))
    site.install("broken", body)
    site.install("good", GOOD)
    registry = site.registry()
    states = {plugin.id: plugin.state for plugin in registry.plugins.values()}
    assert states == {"aaa": State.LOADED, "broken": State.FAILED, "good": State.LOADED}
    broken = registry.plugins["broken"]
    assert told in broken.detail
    assert len(broken.reason) < 500
    assert broken.offers == ()
    assert [offer.name for _, offer in registry.offers(Feature)] == ["first", "good"]


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("{module}:number", "must name a module, such as"),
        ("{module}.deeper", "deeper"),
        ("not-a-module-name", "not-a-module-name"),
        ("{module}:", "{module}"),
    ],
)
def test_case_an_entry_point_without_a_module_fails_alone(site, entry, told):
    module = "thrown_pointed"
    site.install("broken", "number = 3\nclass Thing: pass\n", module=module, entry=entry.format(module=module))
    site.install("good", GOOD)
    registry = site.registry()
    assert registry.plugins["good"].state is State.LOADED
    assert registry.plugins["broken"].state is State.FAILED
    assert told.format(module=module) in registry.plugins["broken"].detail


def test_a_distribution_without_metadata_does_not_affect_others(site):
    site.install("good", GOOD)
    site.install("bare", GOOD.replace("'good'", "'bare'"))
    (site.folder / "ax_bare-0.1.dist-info" / "METADATA").unlink()
    registry = site.registry()
    assert registry.plugins["good"].state is State.LOADED
    assert registry.why_missing("nothing") == ""
    str(registry.plugins.get("bare"))


def test_case_two_distributions_with_the_same_id_are_named(site):
    site.feature("twin", distribution="ax-one", version="1.0")
    site.feature("twin", distribution="ax-two", version="2.0")
    site.install("good", GOOD)
    registry = site.registry()
    plugin = registry.plugins["twin"]
    assert plugin.state is State.FAILED
    assert "ax-one 1.0" in plugin.detail
    assert "ax-two 2.0" in plugin.detail
    assert registry.find(Feature, "twin") is None
    assert registry.plugins["good"].state is State.LOADED
    assert "two distributions" in registry.why_missing("twin")


def test_two_ids_for_one_module_conflict(site):
    module = site.feature("first", names=("shared",))
    site.install("second", entry=module)
    registry = site.registry()
    assert {plugin.state for plugin in registry.plugins.values()} == {State.LOADED}
    with pytest.raises(PluginError, match=r"'shared' is offered by first \(ax-first 0\.1\) and second"):
        registry.find(Feature, "shared")


def test_the_same_entry_point_seen_twice_is_one_plugin(site):
    site.install("good", GOOD)
    points = [*next(iter(importlib.metadata.distributions(path=[str(site.folder)]))).entry_points] * 2
    registry = type(site.registry())(points, {})
    assert registry.plugins["good"].state is State.LOADED
    assert len(registry.offers(Feature)) == 1


def test_a_feature_of_two_plugins_raises_and_suggests_disabling_one(site):
    site.feature("one", names=("moe",), version="1.0")
    site.feature("two", names=("moe", "other"), version="2.0")
    registry = site.registry()
    with pytest.raises(PluginError) as error:
        registry.find(Feature, "moe")
    for part in ("feature 'moe'", "one (ax-one 1.0)", "two (ax-two 2.0)", "AXCORE_DISABLE=one or AXCORE_DISABLE=two"):
        assert part in str(error.value)
    assert registry.find(Feature, "other")[0].id == "two"
    assert site.registry({"AXCORE_DISABLE": "one"}).find(Feature, "moe")[0].id == "two"


def test_a_plugin_that_offers_a_feature_twice_fails(site):
    site.feature("one", names=("moe", "moe"))
    plugin = site.registry().plugins["one"]
    assert plugin.state is State.FAILED
    assert "moe" in plugin.detail


def test_disabled_plugins_are_not_imported(site):
    site.install("bad", "1 / 0")
    site.install("good", GOOD)
    registry = site.registry({"AXCORE_DISABLE": " bad ,"})
    assert (registry.plugins["bad"].state, registry.plugins["bad"].detail) == (State.DISABLED, "by AXCORE_DISABLE")
    assert registry.plugins["good"].state is State.LOADED
    assert "by AXCORE_DISABLE" in registry.why_missing("bad")


def test_axcore_plugins_disables_all_other_plugins(site):
    site.install("bad", "1 / 0")
    site.install("good", GOOD)
    registry = site.registry({"AXCORE_PLUGINS": "good"})
    assert (registry.plugins["bad"].state, registry.plugins["bad"].detail) == (State.DISABLED, "by AXCORE_PLUGINS")
    assert registry.plugins["good"].state is State.LOADED


def test_an_empty_axcore_plugins_disables_every_plugin(site):
    site.install("good", GOOD)
    plugin = site.registry({"AXCORE_PLUGINS": ""}).plugins["good"]
    assert (plugin.state, plugin.reason) == (State.DISABLED, "by AXCORE_PLUGINS, which is set and empty")


def test_axcore_disable_overrides_axcore_plugins(site):
    site.install("good", GOOD)
    registry = site.registry({"AXCORE_PLUGINS": "good", "AXCORE_DISABLE": "good"})
    assert registry.plugins["good"].detail == "by AXCORE_DISABLE"


def test_an_id_of_two_distributions_can_be_disabled(site):
    site.feature("twin", distribution="ax-one")
    site.feature("twin", distribution="ax-two")
    assert site.registry({"AXCORE_DISABLE": "twin"}).plugins["twin"].state is State.DISABLED


@pytest.mark.parametrize("variable", ["AXCORE_DISABLE", "AXCORE_PLUGINS"])
def test_an_unknown_id_in_a_list_raises_with_a_suggestion(site, variable):
    site.install("good", GOOD)
    with pytest.raises(
        PluginError,
        match=rf"{variable} names 'goood', which is not the id of an installed plugin\. Did you mean 'good'\?",
    ):
        site.registry({variable: "goood"})


@pytest.mark.parametrize("needs", [API_VERSION + 1, 0])
def test_a_plugin_for_another_api_version_is_incompatible(site, needs):
    site.install("newer", f"axcore_api = {needs!r}\n{GOOD}")
    plugin = site.registry().plugins["newer"]
    assert plugin.state is State.INCOMPATIBLE
    assert f"axcore_api={needs}, but this axcore has plugin API {API_VERSION}. Install " in plugin.detail
    assert plugin.offers == ()


def test_the_error_for_an_older_api_names_the_migration_page(site):
    site.install("older", f"axcore_api = {API_VERSION - 1}\n{GOOD}")
    told = site.registry().plugins["older"].reason
    page = re.search(r"docs/plugins/\w+\.md", told)
    assert page is not None and (ROOT / page[0]).read_text().startswith(f"# Moving a plugin to API {API_VERSION}\n")


def test_a_plugin_for_this_api_is_loaded(site):
    site.install("same", f"axcore_api = {API_VERSION}\n{GOOD}")
    assert site.registry().plugins["same"].state is State.LOADED


def test_a_plugin_that_cannot_run_here_is_unavailable_with_its_reason(site):
    site.install("tpu", "raise Unavailable('it needs a TPU')")
    site.install("good", GOOD)
    registry = site.registry()
    assert (registry.plugins["tpu"].state, registry.plugins["tpu"].detail) == (State.UNAVAILABLE, "it needs a TPU")
    assert registry.why_missing("tpu") == "plugin 'tpu' (ax-tpu 0.1) is installed but unavailable: it needs a TPU"
    assert registry.plugins["good"].state is State.LOADED


def test_a_plugin_that_is_unavailable_without_a_reason_says_so(site):
    site.install("tpu", "raise Unavailable\n")
    assert site.registry().plugins["tpu"].reason == "no reason given"


@pytest.mark.parametrize("variable", ["AXCORE_DISABLE", "AXCORE_PLUGINS"])
def test_a_distribution_name_in_a_list_raises_and_suggests_the_id(site, variable):
    site.install("good", GOOD)
    with pytest.raises(PluginError, match=rf"{variable} names 'ax-good'.* Did you mean 'good'\?"):
        site.registry({variable: "ax-good"})


def test_the_order_of_entry_points_does_not_matter(site):
    for id in ("b", "a", "c"):
        site.feature(id)
    points = [point for d in importlib.metadata.distributions(path=[str(site.folder)]) for point in d.entry_points]
    make = type(site.registry())
    assert [list(make(order, {}).plugins) for order in (points, points[::-1])] == [["a", "b", "c"]] * 2


def test_a_module_belongs_to_the_plugin_of_its_package(site):
    module = site.install("good", GOOD)
    registry = site.registry()
    assert registry.owner(f"{module}.deep.inside").id == "good"
    assert registry.owner(f"{module}_other") is None
    assert registry.owner("axcore.nn.linear") is None


def test_plugins_that_share_a_namespace_own_only_their_modules(site):
    for name in ("moe", "rope"):
        package = site.folder / "thrown_namespace" / name
        package.mkdir(parents=True)
        (package / "plugin.py").write_text("")
        site.install(name, module=f"unused_{name}", entry=f"thrown_namespace.{name}.plugin")
    registry = site.registry()
    assert registry.owner("thrown_namespace.moe.layer").id == "moe"
    assert registry.owner("thrown_namespace.rope.layer").id == "rope"
    assert registry.owner("thrown_namespace.elsewhere") is None


NODE_CODE = """
import axcore as ax

class Node(ax.Config):
    size: int = 1

def edit(cfg=None):
    return Node(size=7)
"""


def test_case_a_plugin_installed_while_the_process_runs_is_found(alone):
    alone.install("early", GOOD)
    with pytest.raises(PluginError, match="no installed plugin offers the feature 'late'"):
        use("late")
    assert host.installed("ax-late") is None
    (alone.folder / "thrown_late_code.py").write_text(NODE_CODE)
    alone.install("late", hook("return [Feature('late', 'thrown_late_code:edit', '')]"))
    attach = use("late")
    from thrown_late_code import Node

    assert attach(Node()) == Node(size=7)
    assert list(registry().plugins) == ["core", "early", "late"]
    assert registry().owner("thrown_late_code").id == "late" and host.installed("ax-late") == "0.1"


def test_case_every_kind_of_offer_is_found_after_its_installation(alone):
    with pytest.raises(PluginError, match="no mesh rule"):
        target("npu-x1-8")
    alone.install("rules", hook("return [MeshRule('r', 'math:sqrt', '', 'npu-*')]", name="axcore_mesh_rules"))
    target("npu-x1-8")
    with pytest.raises(PluginError, match="there is no recipe 'new'"):
        recipe("new")
    (alone.folder / "thrown_node.py").write_text(NODE_CODE)
    alone.install("new", hook("return [Recipe('new', 'thrown_node:edit', '')]", name="axcore_recipes"))
    assert recipe("new").size == 7
    alone.install("twice", GOOD, distribution="ax-one")
    alone.install("twice", GOOD, distribution="ax-two")
    assert registry.refresh() and "two distributions claim the id 'twice'" in registry().plugins["twice"].detail
    assert not registry.refresh()
