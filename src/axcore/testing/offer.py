"""The checks that all kinds of plugin offers share."""

from __future__ import annotations

import functools
import importlib
import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import ClassVar

from axcore.config import Config, ConfigError, content_hash, from_json, has_field, parse_text, text, to_json
from axcore.plugin import Offer, Plugin, State, registry, resolve
from axcore.plugin.offers import OFFERS
from axcore.plugin.slots import config_type

_PROBE = """
import importlib, json, sys
import axcore.plugin
importlib.import_module({module!r})
heavy = [name for name in ("jax", "flax") if name in sys.modules]
from jax._src import xla_bridge
problems = {{}}
for target in {targets!r}:
    before = xla_bridge.backends_are_initialized()
    try:
        importlib.import_module(target)
    except Exception as error:
        problems[target] = repr(error)
    if xla_bridge.backends_are_initialized() and not before:
        problems[target] = "it starts a JAX backend; do not compute at import"
print(json.dumps([heavy, problems]))
"""


class OfferSuite:
    """Checks of a plugin and its offer. Every other suite inherits them.

    Attributes:
        kind: the class of the offer.
        name: the name of the offer, as in `axcore.use`.
        options: options of `axcore.use`, or fields of the offered Config.
    """

    kind: ClassVar[type[Offer]]
    name: ClassVar[str]
    options: ClassVar[Mapping[str, object]] = {}

    def found(self) -> tuple[Plugin, Offer]:
        """The plugin and the offer."""
        found = registry().find(self.kind, self.name)
        listed = ", ".join(f"{plugin.id}: {plugin.state}" for plugin in registry().plugins.values())
        assert found is not None, f"no installed plugin offers the {self.kind.kind} {self.name!r} ({listed})"
        return found

    def config(self) -> Config:
        """A config that contains the offered class."""
        raise NotImplementedError

    def test_plugin_is_loaded(self) -> None:
        plugin, offer = self.found()
        assert plugin.state is State.LOADED
        assert offer.summary.strip(), "the offer must have a summary"

    def test_plugin_imports_no_jax_and_starts_no_backend(self) -> None:
        plugin, offer = self.found()
        offers = (each for kind in OFFERS.values() for owner, each in registry().offers(kind) if owner == plugin)
        heavy, problems = _probe(plugin.module, frozenset(each.target.partition(":")[0] for each in offers))
        assert heavy == [], f"{plugin.module} imports {heavy}; import it in the module of the target instead"
        problem = problems.get(offer.target.partition(":")[0])
        assert problem is None, f"importing {offer.target}: {problem}"

    def test_reloading_does_not_change_the_offer(self) -> None:
        plugin, offer = self.found()
        first = resolve(plugin, offer)
        importlib.reload(sys.modules[plugin.module])
        again = registry().find(self.kind, self.name)
        assert again is not None
        assert again[1] == offer
        assert resolve(*again) is first

    def test_config_survives_text_json_and_pickle(self) -> None:
        cfg = self.config()
        assert text(cfg) == "".join(f"{path}: {value}\n" for path, value in parse_text(text(cfg)).items())
        assert from_json(to_json(cfg)) == cfg
        copy = pickle.loads(pickle.dumps(cfg))
        assert copy == cfg
        assert content_hash(copy) == content_hash(cfg)

    def test_an_unknown_option_raises_a_config_error(self) -> None:
        plugin, offer = self.found()
        if not offer.slot:
            return
        try:
            config_type(plugin, offer)(**{"no_such_option": 1})
        except ConfigError as error:
            assert "no_such_option" in str(error)
        else:
            raise AssertionError("the Config accepts an option that does not exist")


@functools.cache  # one process for all suites of a plugin
def _probe(module: str, targets: frozenset[str]) -> tuple[list[str], dict[str, str]]:
    """Imports a plugin, and then the modules of its offers, in a new process.

    Returns:
        Which of jax and flax the plugin imports, and module -> problem for those that cannot be imported or start a
        backend.
    """
    code = _PROBE.format(module=module, targets=sorted(targets))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    heavy, problems = json.loads(done.stdout.splitlines()[-1])
    return heavy, problems


def offered_config(suite: OfferSuite, **widths: object) -> Config:
    """The offered Config with the options of the suite, and with those `widths` that it declares as fields."""
    cfg = config_type(*suite.found())(**suite.options)
    return cfg.fill(**{name: value for name, value in widths.items() if has_field(cfg, name)})
