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
from axcore.plugin.slots import config_type

_PROBE = """
import json, sys
import axcore.plugin
import {module}
heavy = [name for name in ("jax", "flax") if name in sys.modules]
import {target}
from jax._src import xla_bridge
print(json.dumps([heavy, xla_bridge.backends_are_initialized()]))
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
        heavy, started = _probe(plugin.module, offer.target.partition(":")[0])
        assert heavy == [], f"{plugin.module} imports {heavy}; import it in the module of the target instead"
        assert not started, f"importing {offer.target} starts a JAX backend; do not compute at import"

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


@functools.cache
def _probe(module: str, target: str) -> tuple[list[str], bool]:
    """(which of jax and flax the plugin imports, whether importing the target starts a backend)."""
    code = _PROBE.format(module=module, target=target)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    heavy, started = json.loads(done.stdout)
    return heavy, started


def offered_config(suite: OfferSuite, **widths: object) -> Config:
    """The offered Config with the options of the suite, and with those `widths` that it declares as fields."""
    cfg = config_type(*suite.found())(**suite.options)
    return cfg.fill(**{name: value for name, value in widths.items() if has_field(cfg, name)})
