"""What holds for everything that a plugin offers."""

from __future__ import annotations

import functools
import importlib
import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from axcore.config import ConfigError, content_hash, from_json, parse_text, text, to_json
from axcore.plugin import Offer, Plugin, State, registry, resolve

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
    """Checks of the plugin itself. The suites by kind inherit them.

    Attributes:
        kind: the class of the offer.
        name: what `axcore.use` knows it by.
        options: for `axcore.use`, or for the Config of what is offered.
    """

    kind: ClassVar[type[Offer]]
    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

    def found(self) -> tuple[Plugin, Any]:
        """The plugin and the offer."""
        found = registry().find(self.kind, self.name)
        listed = ", ".join(f"{plugin.id}: {plugin.state}" for plugin in registry().plugins.values())
        assert found is not None, f"no installed plugin offers the {self.kind.kind} {self.name!r} ({listed})"
        return found

    def config(self) -> Any:
        """A config that what is offered is part of."""
        raise NotImplementedError

    def test_plugin_is_loaded(self) -> None:
        plugin, offer = self.found()
        assert plugin.state is State.LOADED
        assert offer.summary.strip(), "an offer has a line about it"

    def test_manifest_is_light_and_starts_no_backend(self) -> None:
        plugin, offer = self.found()
        heavy, started = _probe(plugin.module, offer.target.partition(":")[0])
        assert heavy == [], f"{plugin.module} imports {heavy}; describe there, and import where the target is"
        assert not started, f"importing {offer.target} starts a jax backend; compute nothing at import"

    def test_loading_again_is_harmless(self) -> None:
        plugin, offer = self.found()
        first = resolve(plugin, offer)
        importlib.reload(sys.modules[plugin.module])
        again = registry().find(self.kind, self.name)
        assert again is not None
        assert again[1] == offer
        assert resolve(*again) is first

    def test_config_reads_back_from_text_json_and_pickle(self) -> None:
        cfg = self.config()
        assert text(cfg) == "".join(f"{path}: {value}\n" for path, value in parse_text(text(cfg)).items())
        assert from_json(to_json(cfg)) == cfg
        copy = pickle.loads(pickle.dumps(cfg))
        assert copy == cfg
        assert content_hash(copy) == content_hash(cfg)

    def test_unknown_option_is_a_config_error(self) -> None:
        plugin, offer = self.found()
        if not offer.slot:
            return
        try:
            resolve(plugin, offer).Config(no_such_option=1)
        except ConfigError as error:
            assert "no_such_option" in str(error)
        else:
            raise AssertionError("an option that does not exist was taken")


@functools.cache
def _probe(module: str, target: str) -> tuple[list[str], bool]:
    """(heavy modules that the import brings, whether the target's import started a backend)."""
    code = _PROBE.format(module=module, target=target)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    heavy, started = json.loads(done.stdout)
    return heavy, started


def offered_config(suite: OfferSuite, **widths: Any) -> Any:
    """The Config of what a suite's offer names, with the suite's options; widths that it declares are filled in."""
    cfg = resolve(*suite.found()).Config(**suite.options)
    return cfg.fill(**{name: value for name, value in widths.items() if name in type(cfg).__dataclass_fields__})
