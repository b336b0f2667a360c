"""The hook specs: their documentation, what they are given, and how they may change without breaking a plugin."""

import importlib.metadata
import inspect
import re
import sys
import typing
import warnings

import pytest

from axcore.plugin import API_VERSION, Feature, Host, Registry, State
from axcore.plugin.hooks import FAMILIES, OFFERS, hookspec

SPECS = {name: spec for family in FAMILIES for name, spec in vars(family).items() if name.startswith("axcore_")}


def features(argument="", *, name="axcore_features", mark="@hookimpl", summary="'A feature.'", id="good"):
    return f"{mark}\ndef {name}({argument}):\n    return [Feature({id!r}, 'math:sqrt', {summary})]\n"


def registry_of(installed, families=FAMILIES, **arguments):
    found = importlib.metadata.distributions(path=[str(installed.folder)])
    points = [point for dist in found for point in dist.entry_points]
    return Registry(points, {}, families=families, arguments=arguments)


def test_every_kind_of_offer_has_a_spec_and_every_spec_a_kind():
    assert set(SPECS) == set(OFFERS)
    assert len(set(OFFERS.values())) == len(OFFERS)
    slots = [kind.slot for kind in OFFERS.values() if kind.slot]
    assert len(set(slots)) == len(slots) == 6


@pytest.mark.parametrize("hook", OFFERS)
def test_a_spec_is_typed(hook):
    hints = typing.get_type_hints(SPECS[hook])
    assert hints == {"host": Host, "return": list[OFFERS[hook]]}


@pytest.mark.parametrize("hook", OFFERS)
def test_the_example_of_a_spec_is_a_plugin(site, hook):
    example = re.search(r"```python\n(.*?)```", inspect.getdoc(SPECS[hook]), re.DOTALL)[1]
    site.install("example", f"from axcore.plugin import Host, {OFFERS[hook].__name__}\n{example}")
    plugin = site.registry().plugins["example"]
    assert plugin.state is State.LOADED, plugin.detail
    assert [type(offer) for offer in plugin.offers] == [OFFERS[hook]]
    if sys.platform != "linux":
        return
    assert "." in plugin.offers[0].target and plugin.offers[0].summary.endswith(".")


# What a hook is given.


def test_a_hook_that_asks_for_the_host_gets_it(site):
    told = "' '.join([str(host.api), host.axcore, host.python, host.platform, str(host.installed('no-such-thing'))])"
    site.install("good", features("host", summary=told))
    (offer,) = site.registry().plugins["good"].offers
    version = importlib.metadata.version("axcore")
    assert offer.summary == f"{API_VERSION} {version} {sys.version.split()[0]} {sys.platform} None"


def test_the_host_knows_what_is_installed():
    assert Host(1).installed("pluggy") == importlib.metadata.version("pluggy")
    assert Host(1).installed("no-such-distribution") is None


def test_a_hook_may_offer_nothing(site):
    site.install("good", "@hookimpl\ndef axcore_features(host):\n    return []\n")
    plugin = site.registry().plugins["good"]
    assert (plugin.state, plugin.offers) == (State.LOADED, ())


def test_an_argument_with_a_default_is_the_plugins_own(site):
    site.install("good", features("host, extra=3", summary="str(extra)"))
    assert site.registry().plugins["good"].offers[0].summary == "3"


@pytest.mark.parametrize("argument", ["host=None", "*, host", "host, /", "*, host=None, **more"])
def test_the_host_is_given_however_it_is_taken(site, argument):
    site.install("good", features(argument, summary="host.python"))
    plugin = site.registry().plugins["good"]
    assert plugin.state is State.LOADED, plugin.detail
    assert plugin.offers[0].summary == sys.version.split()[0]


# How specs change.


class GrownHooks:
    """`axcore_features` after it gained an argument."""

    @hookspec
    def axcore_features(self, host, site):
        """Features."""


class FadingHooks:
    """`axcore_features` with an argument on its way out, and a hook on its way out."""

    @hookspec(warn_on_impl_args={"version": DeprecationWarning("`version` goes in API 2; take `host`")})
    def axcore_features(self, host, version):
        """Features."""

    @hookspec(warn_on_impl=DeprecationWarning("`axcore_commands` goes in API 2"))
    def axcore_commands(self):
        """Commands."""


def test_a_new_argument_breaks_no_plugin_that_does_not_know_it(site):
    site.install("older", features(id="older"))
    site.install("old", features("host", id="old"))
    site.install("new", features("site, host", id="new", summary="site"))
    registry = registry_of(site, [GrownHooks], site="the site")
    assert {plugin.state for plugin in registry.plugins.values()} == {State.LOADED}
    assert registry.find(Feature, "new")[1].summary == "the site"
    assert registry.find(Feature, "old") and registry.find(Feature, "older")


def test_an_argument_that_was_taken_away_fails_the_plugin_that_has_it_and_names_it(site):
    site.install("old", features("site"))
    plugin = registry_of(site).plugins["old"]
    assert plugin.state is State.FAILED and "'site'" in plugin.detail


@pytest.mark.parametrize("filters", ["default", "error"])
def test_deprecated_arguments_and_hooks_are_kept_as_warnings_and_not_printed(site, filters):
    site.install("old", features("version", summary="version"))
    site.install("older", "@hookimpl\ndef axcore_commands():\n    return []\n")
    site.install("good", features("host"))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(filters)
        registry = registry_of(site, [FadingHooks], version="0.1")
    assert not shown
    assert {plugin.state for plugin in registry.plugins.values()} == {State.LOADED}
    assert registry.plugins["old"].warnings == ("`version` goes in API 2; take `host`",)
    assert registry.plugins["older"].warnings == ("`axcore_commands` goes in API 2",)
    assert registry.plugins["good"].warnings == ()
    assert registry.plugins["old"].offers[0].summary == "0.1"


def test_a_hook_of_a_newer_axcore_may_be_implemented_as_optional(site):
    site.install("good", features() + "@hookimpl(optionalhook=True)\ndef axcore_wings(feathers):\n    return 1 / 0\n")
    plugin = site.registry().plugins["good"]
    assert plugin.state is State.LOADED, plugin.detail
    assert [offer.name for offer in plugin.offers] == ["good"]


def test_a_hook_may_have_a_name_of_its_own(site):
    site.install("good", features(name="mine", mark="@hookimpl(specname='axcore_features')"))
    assert [offer.name for offer in site.registry().plugins["good"].offers] == ["good"]


def test_a_marked_function_that_is_no_hook_fails_whatever_it_is_called(site):
    site.install("bad", features(name="features"))
    plugin = site.registry().plugins["bad"]
    assert plugin.state is State.FAILED and "unknown hook 'features'" in plugin.detail


# The version of the API.

NEWER = f"axcore_api = {API_VERSION + 1}\n"


@pytest.mark.parametrize(
    "trouble",
    [
        "from axcore.plugin import Hologram\n",
        "import no_such_module_anywhere\n",
        "@hookimpl\ndef axcore_holograms():\n    return []\n",
        "raise SystemExit\n",
    ],
)
def test_a_plugin_for_a_newer_api_that_does_not_even_import_is_incompatible_and_not_failed(site, trouble):
    if trouble.startswith("@"):
        trouble = f"from axcore.plugin import hookimpl\n{trouble}"
    site.install("newer", trouble + NEWER, head="")
    plugin = site.registry().plugins["newer"]
    assert plugin.state is State.INCOMPATIBLE
    assert plugin.reason.startswith(f"it needs plugin API {API_VERSION + 1}; this axcore has {API_VERSION}")
    assert plugin.api == API_VERSION + 1


@pytest.mark.parametrize("stated", [f"axcore_api: int = {API_VERSION}\n", "axcore_api = 1 + 1\n", "def broken(:\n", ""])
def test_a_plugin_that_states_no_other_api_has_failed(site, stated):
    site.install("broken", stated, head="import no_such_module_anywhere\n")
    assert site.registry().plugins["broken"].state is State.FAILED


def test_the_api_is_read_below_a_package_without_importing_it(site):
    package = site.folder / "thrown_package"
    package.mkdir()
    (package / "__init__.py").write_text("1 / 0\n")
    (package / "plugin.py").write_text(NEWER)
    site.install("newer", module="unused", entry="thrown_package.plugin")
    assert site.registry().plugins["newer"].state is State.INCOMPATIBLE
