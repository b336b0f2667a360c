"""Temporary plugin distributions."""

import importlib
import importlib.metadata
import sys

import pytest

from axcore.plugin import Registry, registry

HEAD = """
from axcore.plugin import Feature, KVCacheOffer, MeshRule, Recipe, Unavailable, hookimpl
"""


class Site:
    """A folder of fake installed distributions, first on sys.path."""

    def __init__(self, folder):
        self.folder = folder

    def install(self, id, body="", *, distribution=None, module=None, entry=None, version="0.1", head=HEAD):
        """Installs a distribution whose module holds `body`. Its entry point is `id = module`, or `id = entry`."""
        distribution = distribution or f"ax-{id}"
        module = module or f"thrown_{distribution.replace('-', '_')}"
        (self.folder / f"{module}.py").write_text(head + body)
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[axcore.plugins]\n{id} = {entry or module}\n")
        importlib.invalidate_caches()
        return module

    def feature(self, id, names=("",), target="math:sqrt", **options):
        """Installs a plugin that offers features of these names (its own id, by default)."""
        offers = ", ".join(f"Feature({name or id!r}, {target!r}, 'A feature.')" for name in names)
        return self.install(id, f"@hookimpl\ndef axcore_features():\n    return [{offers}]\n", **options)

    def registry(self, environ=()):
        """A registry of only the plugins in this folder."""
        found = importlib.metadata.distributions(path=[str(self.folder)])
        return Registry([point for dist in found for point in dist.entry_points], dict(environ))


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    registry.cache_clear()
    yield Site(tmp_path)
    registry.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith("thrown_"):
            del sys.modules[name]


@pytest.fixture
def alone(site, monkeypatch):
    """A `Site` whose plugins are the only ones that `registry()` finds."""

    def entry_points(group):
        found = importlib.metadata.distributions(path=[str(site.folder)])
        return [point for dist in found for point in dist.entry_points if point.group == group]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    return site
