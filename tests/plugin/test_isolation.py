"""Plugin discovery: recursion, threads, offers of the core, conflicts and strict mode."""

import importlib.metadata
import threading

import pytest

from axcore.plugin import (
    AttentionKernelOffer,
    Feature,
    KVCacheOffer,
    PluginError,
    Registry,
    State,
    recipe,
    registry,
    use,
)
from axcore.plugin.registry import CORE_POINT

GOOD = "@hookimpl\ndef axcore_features():\n    return [Feature('{0}', 'math:sqrt', 'Good.')]\n"


# Plugins that use the registry during discovery.


@pytest.mark.parametrize(
    "body",
    [
        "import axcore\naxcore.use('good')\n",
        "import axcore\naxcore.recipe('quickstart')\n",
        "from axcore.plugin import registry\nregistry()\n",
        "@hookimpl\ndef axcore_features():\n    from axcore.plugin import registry\n    return registry().plugins\n",
    ],
    ids=["use", "recipe", "registry", "in a hook"],
)
def test_a_plugin_that_uses_the_registry_in_discovery_fails_alone(alone, body):
    alone.install("asks", body)
    alone.install("good", GOOD.format("good"))
    plugins = registry().plugins
    assert plugins["asks"].state is State.FAILED
    assert "plugin discovery is still running" in plugins["asks"].reason
    assert plugins["good"].state is State.LOADED
    assert registry().plugins is plugins
    with pytest.raises(PluginError, match=r"plugin 'asks' \(ax-asks 0\.1\) .* failed: .*still running"):
        use("asks")


def test_a_plugin_may_import_all_of_axcore(alone):
    alone.install("good", "import axcore\nfrom axcore import Config, select, use, recipe\n" + GOOD.format("good"))
    assert registry().plugins["good"].state is State.LOADED


def test_concurrent_threads_share_one_discovery(alone):
    alone.install("slow", "import time\ntime.sleep(0.1)\n" + GOOD.format("slow"))
    found = []
    threads = [threading.Thread(target=lambda: found.append(registry())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8 and len({id(each) for each in found}) == 1
    assert found[0].plugins["slow"].state is State.LOADED


def test_discovery_runs_once_but_again_after_an_error(alone, monkeypatch):
    alone.install("good", GOOD.format("good"))
    monkeypatch.setenv("AXCORE_DISABLE", "goood")
    for _ in range(2):
        with pytest.raises(PluginError, match="goood"):
            registry()
    monkeypatch.delenv("AXCORE_DISABLE")
    first = registry()
    alone.install("late", GOOD.format("late"))
    assert registry() is first and "late" not in first.plugins


# Offers of the core.


def test_an_empty_axcore_plugins_does_not_disable_the_core(alone, monkeypatch):
    alone.install("good", GOOD.format("good"))
    monkeypatch.setenv("AXCORE_PLUGINS", "")
    core = registry().plugins["core"]
    assert (core.state, core.distribution) == (State.LOADED, "axcore"), core.detail
    assert core.version == importlib.metadata.version("axcore")
    assert registry().plugins["good"].state is State.DISABLED
    assert registry().find(AttentionKernelOffer, "reference")[0] is core
    assert registry().find(KVCacheOffer, "contiguous")[0] is core


def test_the_core_cannot_be_disabled(alone, monkeypatch):
    monkeypatch.setenv("AXCORE_DISABLE", "core")
    with pytest.raises(PluginError, match="AXCORE_DISABLE names 'core', which is axcore itself"):
        registry()


def test_modules_of_the_core_have_no_owner(alone):
    assert registry().owner("axcore.nn.linear") is None


def test_a_conflict_with_the_core_says_which_plugin_to_disable(site):
    site.install(
        "rival", "@hookimpl\ndef axcore_kv_caches():\n    return [KVCacheOffer('contiguous', 'a:b', 'Mine.')]\n"
    )
    points = [*next(importlib.metadata.distributions(path=[str(site.folder)])).entry_points, CORE_POINT]
    with pytest.raises(PluginError, match=r"kv cache 'contiguous' .* core \(.* and rival \(.*AXCORE_DISABLE=rival"):
        Registry(points, {}).find(KVCacheOffer, "contiguous")


# Conflicts and strict mode.


def twice(site):
    for id in ("one", "two"):
        site.install(id, "@hookimpl\ndef axcore_kv_caches():\n    return [KVCacheOffer('ring', 'a:b', 'A ring.')]\n")


def test_a_conflict_is_listed_and_raises_only_when_used(site):
    twice(site)
    site.install("good", GOOD.format("good"))
    found = site.registry()
    assert found.conflicts() == [
        "the kv cache 'ring' is offered by one (ax-one 0.1) and two (ax-two 0.1); uninstall one, or set "
        "AXCORE_DISABLE=one or AXCORE_DISABLE=two"
    ]
    assert found.find(Feature, "good")
    with pytest.raises(PluginError, match="'ring' is offered by"):
        found.find(KVCacheOffer, "ring")


def test_strict_mode_raises_at_discovery_and_lists_all_problems(site):
    twice(site)
    site.install("broken", "1 / 0\n")
    site.install("newer", "axcore_api = 99\n")
    site.install("absent", "raise Unavailable('no TPU here')\n")
    site.install("good", GOOD.format("good"))
    with pytest.raises(PluginError) as error:
        site.registry({"AXCORE_STRICT": "1"})
    told = str(error.value)
    assert "plugin 'broken' (ax-broken 0.1) is failed: ZeroDivisionError: division by zero" in told
    assert "plugin 'newer' (ax-newer 0.1) is incompatible: axcore_api=99, but this axcore has plugin API" in told
    assert "'ring' is offered by one" in told
    assert "good" not in told and "absent" not in told
    site.registry({"AXCORE_STRICT": "0"})
    kept_out = "broken,newer,one"
    site.registry({"AXCORE_STRICT": "1", "AXCORE_DISABLE": kept_out})


@pytest.mark.parametrize("value", ["yes", "2", "true"])
def test_axcore_strict_must_be_0_or_1(site, value):
    with pytest.raises(PluginError, match=rf"AXCORE_STRICT must be 0 or 1, not '{value}'"):
        site.registry({"AXCORE_STRICT": value})


def test_the_error_for_a_missing_offer_lists_failed_plugins(alone):
    alone.install("quant", "1 / 0\n")
    with pytest.raises(
        PluginError, match=r"offers the feature.*\n  not loaded: quant \(ax-quant 0\.1, failed: ZeroDiv"
    ):
        use("int8")
    with pytest.raises(PluginError, match=r"no recipe 'x'\..*\n  not loaded: quant \(ax-quant 0\.1, failed: ZeroDiv"):
        recipe("x")


def test_the_error_for_a_missing_offer_lists_at_most_five_plugins(alone, monkeypatch):
    for number in range(7):
        alone.install(f"p{number}", GOOD.format(f"p{number}"))
    monkeypatch.setenv("AXCORE_PLUGINS", "")
    with pytest.raises(
        PluginError, match=r"p4 \(ax-p4 0\.1, disabled: by AXCORE_PLUGINS, which is set and empty\)\n  and 2 more, see"
    ):
        use("int8")
