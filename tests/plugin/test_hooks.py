"""Plugin hooks: their offers, their arguments, and the version of the plugin API."""

import importlib.metadata
import pathlib
import sys

import pytest

from axcore import plugin as public
from axcore.plugin import API_VERSION, Host, MeshRule, Offer, State
from axcore.plugin.offers import OFFERS

INDEX = pathlib.Path(__file__).parents[2] / "docs/plugins/index.md"


def features(argument="", *, name="axcore_features", mark="@hookimpl", summary="'A feature.'", id="good"):
    return f"{mark}\ndef {name}({argument}):\n    return [Feature({id!r}, 'math:sqrt', {summary})]\n"


def test_every_kind_of_offer_is_public_and_has_its_own_hook():
    kinds = {each for each in vars(public).values() if isinstance(each, type) and issubclass(each, Offer)}
    assert set(OFFERS.values()) == kinds - {Offer}
    assert len({kind.kind for kind in OFFERS.values()}) == len(OFFERS)
    slots = [kind.slot for kind in OFFERS.values() if kind.slot]
    assert len(set(slots)) == len(slots)


@pytest.mark.parametrize("hook", OFFERS)
def test_a_hook_must_return_its_kind_of_offer(site, hook):
    kind = OFFERS[hook]
    more = ", 'cpu-*'" if kind is MeshRule else ""
    head = "from axcore.plugin import *\n@hookimpl\n"
    for number, name in enumerate((kind.__name__, "Recipe" if kind.__name__ != "Recipe" else "Command")):
        offer = f"{name}('x', 'a:b', 'An example.'{more if not number else ''})"
        site.install(f"p{number}", f"{head}def {hook}(host):\n    return [{offer}]\n")
    plugins = site.registry().plugins
    assert [type(offer) for offer in plugins["p0"].offers] == [kind], plugins["p0"].detail
    assert plugins["p1"].state is State.FAILED and f"must return a list of {kind.__name__}" in plugins["p1"].reason


def test_the_plugins_page_lists_every_hook_with_its_offer():
    page = INDEX.read_text()
    for hook, kind in OFFERS.items():
        assert f"| `{hook}` | `{kind.__name__}(" in page


# Arguments of hooks.


def test_a_hook_may_take_the_host(site):
    told = "' '.join([str(host.api), host.axcore, host.python, host.platform, str(host.installed('no-such-thing'))])"
    site.install("good", features("host", summary=told))
    (offer,) = site.registry().plugins["good"].offers
    version = importlib.metadata.version("axcore")
    assert offer.summary == f"{API_VERSION} {version} {sys.version.split()[0]} {sys.platform} None"


def test_host_installed_returns_the_version_of_a_distribution():
    assert Host(1).installed("pluggy") == importlib.metadata.version("pluggy")
    assert Host(1).installed("no-such-distribution") is None


def test_a_hook_may_offer_nothing(site):
    site.install("good", "@hookimpl\ndef axcore_features(host):\n    return []\n")
    plugin = site.registry().plugins["good"]
    assert (plugin.state, plugin.offers) == (State.LOADED, ())


def test_a_hook_may_have_extra_arguments_with_defaults(site):
    site.install("good", features("host, extra=3", summary="str(extra)"))
    assert site.registry().plugins["good"].offers[0].summary == "3"


def test_case_a_hook_with_an_unknown_argument_fails_and_names_it(site):
    site.install("old", features("site"))
    plugin = site.registry().plugins["old"]
    expected = "TypeError: axcore_features takes the argument 'site', but a hook takes only 'host', or nothing"
    assert (plugin.state, plugin.reason) == (State.FAILED, expected)


def test_an_unknown_hook_may_be_marked_optional(site):
    site.install("good", features() + "@hookimpl(optionalhook=True)\ndef axcore_wings(feathers):\n    return 1 / 0\n")
    plugin = site.registry().plugins["good"]
    assert plugin.state is State.LOADED, plugin.detail
    assert [offer.name for offer in plugin.offers] == ["good"]


def test_a_hook_function_may_have_another_name(site):
    site.install("good", features(name="mine", mark="@hookimpl(specname='axcore_features')"))
    assert [offer.name for offer in site.registry().plugins["good"].offers] == ["good"]


def test_a_marked_function_that_is_not_a_hook_fails(site):
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
def test_a_plugin_for_a_newer_api_that_fails_to_import_is_incompatible(site, trouble):
    if trouble.startswith("@"):
        trouble = f"from axcore.plugin import hookimpl\n{trouble}"
    site.install("newer", trouble + NEWER, head="")
    plugin = site.registry().plugins["newer"]
    assert plugin.state is State.INCOMPATIBLE
    assert plugin.reason.startswith(
        f"axcore_api={API_VERSION + 1}, but this axcore has plugin API {API_VERSION}. Install a later axcore"
    )
    assert plugin.api == API_VERSION + 1


@pytest.mark.parametrize("stated", [f"axcore_api: int = {API_VERSION}\n", "axcore_api = 1 + 1\n", "def broken(:\n", ""])
def test_an_import_error_without_another_api_version_is_a_failure(site, stated):
    site.install("broken", stated, head="import no_such_module_anywhere\n")
    assert site.registry().plugins["broken"].state is State.FAILED


def test_the_api_version_is_read_without_importing_the_package(site):
    package = site.folder / "thrown_package"
    package.mkdir()
    (package / "__init__.py").write_text("1 / 0\n")
    (package / "plugin.py").write_text(NEWER)
    site.install("newer", module="unused", entry="thrown_package.plugin")
    assert site.registry().plugins["newer"].state is State.INCOMPATIBLE
