"""`use`, recipes, and which plugins a config uses."""

import pytest

import axcore as ax
from axcore.config import Config, ConfigError
from axcore.plugin import PluginError, active, contributors, recipe, registry, use

CODE = """
import axcore as ax

class Node(ax.Config):
    size: int = 1

def grow(cfg, by, factor=1):
    return cfg.set(size=(cfg.size + by) * factor)

def optional(cfg, amount=1):
    return cfg.set(size=amount)

def keywords(cfg, needed, **rest):
    return cfg.set(size=needed + len(rest))

def fails(cfg):
    raise ax.ConfigError("head_dim must be even")

def plain_recipe():
    return Node(size=7)

def asks():
    return ax.use("quantum")(Node())

def asks_disabled():
    return ax.use("grow", by=1)(Node())

def returns_text():
    return "text"

def raises():
    raise ax.ConfigError("dim must be positive")

def takes(width):
    return Node()

number = 3
"""
FEATURES = ("grow", "optional", "keywords", "fails", "number", "absent")
RECIPES = ("plain_recipe", "asks", "asks_disabled", "returns_text", "raises", "takes", "number")


@pytest.fixture
def code(site):
    """Installs a plugin whose offers are the functions of `CODE`."""
    module = "thrown_code"

    def offers(kind, names):
        return ", ".join(f"{kind}({name!r}, '{module}:{name}', '')" for name in names)

    site.install(
        "code",
        f"@hookimpl\ndef axcore_features():\n    return [{offers('Feature', FEATURES)}, "
        f"Feature('gone', 'no_such_module_anywhere:x', '')]\n"
        f"@hookimpl\ndef axcore_recipes():\n    return [{offers('Recipe', RECIPES)}]\n",
    )
    (site.folder / f"{module}.py").write_text(CODE)
    return site


class Node(Config):
    size: int = 1


def test_a_feature_edits_the_config_with_its_options(code):
    assert use("grow", by=2, factor=3)(Node()).size == 9
    assert ax.pipe(Node(), use("grow", by=1), use("grow", by=2, factor=2)).size == 8
    assert "grow" in str(use("grow", by=2))
    assert "by=2" in str(use("grow", by=2))


def test_an_unknown_feature_says_what_to_install(code):
    with pytest.raises(
        PluginError, match=r"no installed plugin offers the feature 'quantum'\. pip install axcore-quantum"
    ):
        use("quantum")


def test_an_unknown_feature_suggests_a_near_name(code):
    with pytest.raises(PluginError, match=r"Did you mean 'grow'\?"):
        use("grwo")


def test_an_unknown_feature_of_a_recipe_names_the_recipe(code):
    with pytest.raises(PluginError, match=r"recipe 'asks' \(ax-code 0\.1\): .*'quantum'.*pip install axcore-quantum"):
        recipe("asks")


def test_a_feature_of_a_disabled_plugin_says_that_it_is_disabled(code, monkeypatch):
    monkeypatch.setenv("AXCORE_DISABLE", "rope")
    with pytest.raises(PluginError, match=r"'rope'.*plugin 'rope' \(axcore-rope .*disabled: by AXCORE_DISABLE"):
        use("rope")


def test_a_feature_of_a_failed_plugin_gives_the_cause(site):
    site.install("wanted", "import no_such_module_anywhere")
    with pytest.raises(PluginError, match=r"plugin 'wanted' \(ax-wanted 0\.1\) is installed but failed: .*no_such_mod"):
        use("wanted")


def test_an_unknown_option_raises_immediately_with_a_suggestion(code):
    with pytest.raises(ConfigError, match=r"grow has no option 'factr'\. Did you mean 'factor'\?.*ax-code 0\.1"):
        use("grow", by=1, factr=2)
    with pytest.raises(ConfigError, match=r"no option 'cfg'"):
        use("grow", by=1, cfg=2)


def test_a_missing_required_option_raises_immediately(code):
    with pytest.raises(ConfigError, match=r"grow requires the option 'by'.*ax-code 0\.1"):
        use("grow")


def test_a_missing_required_option_raises_with_free_options_too(code):
    assert use("keywords", needed=1, anything=2)(Node()).size == 2
    with pytest.raises(ConfigError, match=r"keywords requires the option 'needed'"):
        use("keywords", anything=2)


@pytest.mark.parametrize(("name", "cause"), [("gone", "ModuleNotFoundError"), ("absent", "AttributeError")])
def test_a_target_that_fails_to_import_names_plugin_and_cause(code, name, cause):
    with pytest.raises(PluginError) as error:
        use(name)
    for part in (f"feature {name!r}", "ax-code 0.1", cause):
        assert part in str(error.value)
    assert type(error.value.__cause__).__name__ == cause


def test_a_feature_that_is_not_a_function_is_a_plugin_error(code):
    with pytest.raises(PluginError, match=r"'number'.*ax-code 0\.1"):
        use("number")


def test_a_recipe_must_be_a_function_without_arguments(code):
    for name in ("number", "takes"):
        with pytest.raises(PluginError, match=rf"{name}'.*ax-code 0\.1"):
            recipe(name)


def test_a_config_error_inside_a_feature_names_it_and_its_plugin(code):
    with pytest.raises(ConfigError, match=r"feature 'fails' \(ax-code 0\.1\): head_dim must be even"):
        use("fails")(Node())
    with pytest.raises(ConfigError, match=r"feature 'optional' \(ax-code 0\.1\): .*size must be int, not 'x'"):
        use("optional", amount="x")(Node())


def test_a_recipe_is_a_config(code):
    assert recipe("plain_recipe").size == 7


def test_an_unknown_recipe_suggests_the_nearest_and_lists_all(code):
    with pytest.raises(PluginError, match=r"no recipe 'plain_recip'\. Did you mean 'plain_recipe'\? Known: .*asks"):
        recipe("plain_recip")


def test_without_recipes_the_error_names_the_disabled_plugin(code, monkeypatch):
    monkeypatch.setenv("AXCORE_PLUGINS", "")
    with pytest.raises(PluginError, match=r"plugin 'recipes' .* disabled: by AXCORE_PLUGINS, which is set and empty"):
        recipe("quickstart")


def test_without_recipes_the_error_says_what_to_install(alone):
    with pytest.raises(PluginError, match=r"pip install axcore-recipes"):
        recipe("quickstart")


def test_a_recipe_must_return_a_config(code):
    with pytest.raises(PluginError, match=r"recipe 'returns_text' \(ax-code 0\.1\) returned str, not a config"):
        recipe("returns_text")


def test_a_config_error_inside_a_recipe_names_the_recipe(code):
    with pytest.raises(ax.AxcoreError) as error:
        recipe("raises")
    told = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    assert "dim must be positive" in told
    assert "raises" in told


def test_active_lists_the_plugins_of_nodes_with_versions(code):
    module = registry().plugins["code"].module

    class Holder(Config):
        below: tuple[Config, ...] = ()

    foreign = type("Foreign", (Config,), {"__module__": f"{module}.layers", "__annotations__": {}})
    assert active(Holder(below=(Node(),))) == {}
    assert active(Holder(below=(Node(), foreign()))) == {"code": "ax-code 0.1"}


def test_contributors_include_the_plugins_whose_features_only_set_fields(code):
    class Holder(Config):
        below: tuple[Config, ...] = ()

    edited = Holder(below=(use("grow", by=2)(Node()),))
    assert active(edited) == {} and contributors(edited) == {"code": "ax-code 0.1"}
    assert contributors(Holder(below=(Node(),))) == {}
