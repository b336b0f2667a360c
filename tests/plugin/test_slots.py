"""`use` fills slots, and the guard protects slots that another plugin has filled."""

import sys
from collections.abc import Mapping

import pytest

import axcore as ax
from axcore.config import Config, ConfigError, Configurable, FrozenDict
from axcore.plugin import PluginError, registry, use, use_text
from axcore.plugin.slots import guard


class Cache(Configurable):
    class Config(Config):
        size: int = 1


class Position(Config):
    size: int = 1


class Attention(Configurable):
    class Config(Config):
        cache: Cache.Config | None = None
        kernel: Cache.Config = Cache.Config()
        position: Config | None = None
        source: Cache.Config


class Disk(Config):
    """Has a field with the name of a slot but another type."""

    cache: str = "/var/cache"


class Layer(Config):
    attention: Attention.Config = Attention.Config()
    other: Attention.Config | None = None
    disk: Disk = Disk()
    free: Config | None = None


class Wrapper(Config):
    inner: Config | None = None


class Callback(Configurable):
    class Config(Config):
        every: int = 1


class Run(Config):
    callbacks: Mapping[str, Callback.Config] = FrozenDict(progress=Callback.Config())
    evaluation: Config | None = None


class Hooked(Config):
    """Has a field with the name of a mapping slot but another type."""

    callbacks: tuple[str, ...] = ()


CODE = """
import tests_of_slots
import axcore as ax

class Ring(tests_of_slots.Cache):
    class Config(tests_of_slots.Cache.Config):
        size: int = 8
        window: float | None = None
        shape: tuple[int, ...] = (1,)

class Stop(tests_of_slots.Callback):
    class Config(tests_of_slots.Callback.Config):
        patience: int = 3

class Stranger(ax.config.Configurable):
    pass

class Position(tests_of_slots.Position):
    pass

class Mine(tests_of_slots.Wrapper):
    pass

class Other(ax.Config):
    attention: int = 0

def plain(cfg):
    return cfg

number = 3

def position(cfg, size=1):
    return ax.select(cfg, tests_of_slots.Attention).set(position=Position(size=size))

def wrap(cfg):
    return ax.select(cfg, tests_of_slots.Position).wrap(Mine(), "inner")

def clear(cfg):
    return ax.select(cfg, tests_of_slots.Attention).set(position=None)

def grow(cfg):
    return ax.select(cfg, tests_of_slots.Position).map(lambda _, node: node.set(size=node.size + 1))

class Attention(tests_of_slots.Attention):
    pass

class Case(tests_of_slots.Wrapper):
    position: ax.Config | None = None

def swap(cfg, keep=False):
    def new(_, node):
        return Attention.Config(position=node.position if keep else None)

    return ax.select(cfg, tests_of_slots.Attention).map(new)

def enclose(cfg):
    return ax.select(cfg, "free").wrap(Case(), "inner")

def restructure(cfg):
    return Other()

def special(cfg, depth=0):
    return ax.select(cfg, tests_of_slots.Attention).set(cache=Ring.Config(size=depth))
"""

OFFERS = """
from axcore.plugin import CallbackOffer, EvaluatorOffer, Feature, KVCacheOffer, NumericsOffer, hookimpl

@hookimpl
def axcore_kv_caches():
    return [KVCacheOffer(name, f"thrown_{id}.code:{{target}}", "A cache.") for name, target in {caches!r}.items()]

@hookimpl
def axcore_features():
    return [Feature(name, f"thrown_{id}.code:{{target}}", "A feature.") for name, target in {features!r}.items()]
"""


@pytest.fixture
def plugin(alone, monkeypatch):
    """Installs a plugin with its own copy of `CODE`: `plugin("id", caches={name: target}, features={name: target})`."""
    monkeypatch.setitem(sys.modules, "tests_of_slots", sys.modules[__name__])

    def install(id, caches=(), features=(), more=""):
        package = alone.folder / f"thrown_{id}"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "code.py").write_text(CODE)
        (package / "plugin.py").write_text(OFFERS.format(id=id, caches=dict(caches), features=dict(features)) + more)
        alone.install(id, module=f"unused_{id}", entry=f"thrown_{id}.plugin")

    return install


# Filling a slot.


def test_use_fills_every_matching_slot_and_applies_options(plugin):
    plugin("ring", caches={"ring": "Ring"})
    cfg = Layer(other=Attention.Config())
    new = use("ring", size=4, window=2.5)(cfg)
    for attention in (new.attention, new.other):
        assert (attention.cache.size, attention.cache.window) == (4, 2.5)
        assert type(attention.cache).target.__module__ == "thrown_ring.code"
        assert attention.kernel == Cache.Config()
    assert new.disk == Disk()  # the same name, another type
    assert "use:ring of ax-ring 0.1(size=4, window=2.5)" in str(new.history("attention.cache"))


def test_where_selects_the_nodes(plugin):
    plugin("ring", caches={"ring": "Ring"})
    cfg = Layer(other=Attention.Config())
    for where in ("other", lambda path, _: path == "other"):
        new = use("ring", where=where)(cfg)
        assert new.attention.cache is None and new.other.cache.size == 8


def test_options_from_text_are_typed_by_the_fields(plugin):
    plugin("ring", caches={"ring": "Ring"})
    new = use_text("ring:size=4,window=3,shape=(1,2),where=other")(Layer(other=Attention.Config()))
    assert new.attention.cache is None
    assert repr((new.other.cache.size, new.other.cache.window, new.other.cache.shape)) == "(4, 3.0, (1, 2))"
    with pytest.raises(ConfigError, match=r"option 'size' of ring: 'x' is not int"):
        use_text("ring:size=x")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sise": 3}, r"ring has no option 'sise'\. Did you mean 'size'\?.*ax-ring 0\.1.*thrown_ring\.code\.Ring"),
        ({"cfg": 3}, r"ring has no option 'cfg'"),
        ({"size": "x"}, r"kv cache 'ring' \(ax-ring 0\.1\): .*Ring\.size must be int, not 'x'"),
        ({"where": "nowhere"}, r"kv cache 'ring' \(ax-ring 0\.1\): nothing in the config matches 'nowhere'"),
        ({"where": "disk"}, r"at disk: .*Disk\.cache must be str, not Config\(\)"),
        ({"where": "attention.kernel"}, r"no node that where='attention.kernel' selects has a slot 'cache' for"),
    ],
)
def test_invalid_options_raise_with_the_offer_and_its_plugin(plugin, options, told):
    plugin("ring", caches={"ring": "Ring"})
    with pytest.raises(ConfigError, match=told.replace("Config\\(\\)", ".*")):
        use("ring", **options)(Layer())


def test_a_config_without_the_slot_raises(plugin):
    plugin("ring", caches={"ring": "Ring", "stranger": "Stranger"})
    with pytest.raises(ConfigError, match=r"kv cache 'ring' \(.*\): no node of the config has a slot 'cache' for"):
        use("ring")(Position())
    with pytest.raises(ConfigError, match=r"no node of the config has a slot 'cache' for thrown_ring\.code\.Stranger"):
        use("stranger")(Layer())


def test_a_config_itself_is_a_target(plugin):
    plugin("ring", caches={"ring": "Position"})
    with pytest.raises(ConfigError, match=r"no node of the config has a slot 'cache' for thrown_ring\.code\.Position"):
        use("ring")(Layer())


def test_a_target_without_a_config_class_is_a_plugin_error(plugin):
    plugin("ring", caches={"ring": "plain"})
    with pytest.raises(PluginError, match=r"kv cache 'ring' of ax-ring 0\.1 must name a class with a Config"):
        use("ring")


def test_an_unknown_name_suggests_slot_offers_too(plugin):
    plugin("ring", caches={"ring-buffer": "Ring"})
    with pytest.raises(PluginError, match=r"Did you mean 'ring-buffer'\?"):
        use("ring-bufer")


def test_a_feature_replaces_the_offer_of_its_plugin_and_name(plugin):
    plugin("ring", caches={"ring": "Ring"}, features={"ring": "special"})
    assert use("ring", depth=5)(Layer()).attention.cache.size == 5
    with pytest.raises(ConfigError, match="no option 'size'"):
        use("ring", size=5)


def test_a_name_offered_by_two_plugins_is_ambiguous(plugin):
    plugin("one", caches={"ring": "Ring"})
    plugin("two", features={"ring": "special"})
    with pytest.raises(PluginError) as error:
        use("ring")
    for part in ("feature by two (ax-two 0.1)", "kv cache by one (ax-one 0.1)", "AXCORE_DISABLE=two"):
        assert part in str(error.value)


def test_a_name_with_two_kinds_in_one_plugin_is_ambiguous(plugin):
    numerics = "@hookimpl\ndef axcore_numerics():\n    return [NumericsOffer('ring', 'a:b', '')]\n"
    plugin("one", caches={"ring": "Ring"}, more=numerics)
    with pytest.raises(PluginError, match=r"kv cache by one .* and numerics by one"):
        use("ring")


# Adding an entry to a mapping.


@pytest.fixture
def stop(plugin):
    """Plugins `one` and `two`, each with a callback `NAME-stop`; `one` has an evaluator, `two` claims `progress`."""
    hook = """
@hookimpl
def axcore_callbacks():
    return [CallbackOffer(name, "thrown_{id}.code:Stop", "A callback.") for name in {names}]
"""
    evaluators = """
@hookimpl
def axcore_evaluators():
    return [EvaluatorOffer("bits", "thrown_one.code:Stop", "An evaluator.")]
"""
    plugin("one", more=hook.format(id="one", names=["stop", "one-stop"]) + evaluators)
    plugin("two", more=hook.format(id="two", names=["two-stop", "progress"]))


def test_use_adds_a_callback_to_every_matching_mapping(stop):
    cfg = Run(evaluation=Wrapper(inner=Run(callbacks={}, evaluation=Hooked())))
    new = use("stop", patience=5)(cfg)
    assert list(new.callbacks) == ["progress", "stop"] and list(new.evaluation.inner.callbacks) == ["stop"]
    assert new.callbacks["stop"].patience == new.evaluation.inner.callbacks["stop"].patience == 5
    assert new.evaluation.inner.evaluation == Hooked()  # the same name, another type
    assert "use:stop of ax-one 0.1(patience=5)" in str(new.history("callbacks.stop"))
    assert ax.override(new, ["callbacks.stop.every=7"]).callbacks["stop"].every == 7


def test_where_selects_the_mappings(stop):
    cfg = Run(evaluation=Run())
    assert list(use_text("stop:where=evaluation")(cfg).callbacks) == ["progress"]
    with pytest.raises(
        ConfigError, match=r"callback 'stop' \(ax-one 0\.1\): at evaluation: .*Hooked\.callbacks must be"
    ):
        use("stop", where="evaluation")(Run(evaluation=Hooked()))
    with pytest.raises(
        ConfigError, match=r"evaluator 'bits' \(ax-one 0\.1\): no node of the config has a slot 'evaluators'"
    ):
        use("bits")(cfg)


def test_an_offer_replaces_its_own_entry_but_not_another_class(stop):
    cfg = use("stop", patience=5)(use("stop")(Run()))
    assert cfg.callbacks["stop"].patience == 5
    with pytest.raises(
        ConfigError,
        match=r"callbacks\.progress already holds .*Callback, not .*select\(cfg, 'callbacks\.progress'\)\.remove",
    ):
        use("progress")(Run())
    foreign = cfg.set(callbacks={**cfg.callbacks, "two-stop": cfg.callbacks["stop"]})
    with pytest.raises(
        ConfigError, match=r"callbacks\.two-stop already holds thrown_one\.code\.Stop of one \(ax-one 0\.1\)"
    ):
        use("two-stop")(foreign)
    assert list(use("two-stop")(cfg).callbacks) == ["progress", "stop", "two-stop"]


# Slots filled by another plugin.


@pytest.fixture
def two(plugin):
    for id in ("one", "two"):
        features = {
            f"{id}-{name}": name for name in ("position", "wrap", "clear", "grow", "swap", "enclose", "restructure")
        }
        plugin(id, features=features, caches={f"{id}-ring": "Ring"})


def test_a_slot_filled_by_another_plugin_is_not_replaced(two):
    cfg = use("one-position")(Layer())
    with pytest.raises(ConfigError) as error:
        use("two-position")(cfg)
    told = str(error.value)
    for part in ("attention.position holds a node of one (ax-one 0.1)", "two (ax-two 0.1) would replace"):
        assert part in told
    emptied = ax.select(cfg, "attention.position").remove()
    assert "axcore.select(cfg, 'attention.position').remove()" in told
    assert type(use("two-position")(emptied).attention.position).__module__ == "thrown_two.code"


def test_the_error_for_a_required_slot_says_how_to_set_it(two):
    def fill(cfg, plugin):
        return ax.select(cfg, Attention).set(kernel=use(f"{plugin}-ring")(cfg).attention.cache)

    before, after = fill(Layer(), "one"), fill(Layer(), "two")
    with pytest.raises(ConfigError, match=r"axcore\.select\(cfg, 'attention'\)\.set\(kernel=\.\.\.\)"):
        guard(registry().plugins["two"], before, after)


def test_filling_a_slot_by_name_is_guarded_too(two):
    cfg = use("one-ring")(Layer())
    with pytest.raises(ConfigError, match=r"kv cache 'two-ring' \(ax-two 0\.1\): attention\.cache holds a node of one"):
        use("two-ring")(cfg)


def test_emptying_a_slot_of_another_plugin_raises(two):
    with pytest.raises(ConfigError, match=r"attention\.position holds a node of one"):
        use("two-clear")(use("one-position")(Layer()))


def test_a_plugin_may_replace_and_clear_its_own_slots(two):
    cfg = use("one-position", size=3)(use("one-position")(Layer()))
    assert cfg.attention.position.size == 3
    assert use("one-clear")(cfg).attention.position is None


def test_a_plugin_may_clear_its_own_slots_after_another_discovery(two):
    clear, cfg = use("one-clear"), use("one-position")(Layer())
    registry.cache_clear()
    assert clear(cfg).attention.position is None


def test_wrapping_and_editing_a_node_of_another_plugin_is_allowed(two):
    cfg = use("one-position")(Layer())
    wrapped = use("two-wrap")(cfg)
    assert type(wrapped.attention.position).__module__ == "thrown_two.code"
    assert wrapped.attention.position.inner == cfg.attention.position
    assert use("two-grow")(cfg).attention.position.size == 2
    with pytest.raises(ConfigError, match=r"attention\.position holds a node of two"):
        use("one-position")(wrapped)


def test_slots_of_swapped_and_wrapped_nodes_are_guarded(two):
    cfg = use("one-position")(Layer(free=Attention.Config()))
    with pytest.raises(ConfigError, match=r": attention\.position holds a node of one"):
        use("two-swap")(cfg)
    assert use("two-swap", keep=True)(cfg).free.position == cfg.free.position
    enclosed = use("two-enclose")(cfg)  # the wrapper has its own field `position`
    assert enclosed.free.inner == cfg.free and enclosed.free.position is None
    grown = use("one-swap", keep=True)(cfg)
    with pytest.raises(ConfigError, match=r": attention\.position holds a node of one"):
        use("two-position")(grown)


def test_nodes_of_the_core_or_the_user_may_be_replaced(two):
    cfg = ax.select(Layer(), Attention).set(position=Position(), cache=Cache.Config())
    assert type(use("one-ring")(use("one-position")(cfg)).attention.position).__module__ == "thrown_one.code"


def test_removing_the_node_that_holds_a_slot_is_allowed(two):
    assert use("two-restructure")(use("one-position")(Layer())).attention == 0


def test_a_node_from_a_recipe_may_be_replaced(two, plugin):
    plugin("recipes", more="def f(): pass\n")
    import thrown_recipes.code

    cfg = ax.select(Layer(), Attention).set(position=thrown_recipes.code.Position())
    assert type(use("one-position")(cfg).attention.position).__module__ == "thrown_one.code"
