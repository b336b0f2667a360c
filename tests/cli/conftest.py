"""Temporary plugin distributions."""

import importlib
import sys

import pytest

from axcore.plugin import registry


@pytest.fixture
def install(monkeypatch, tmp_path, fresh_registry):
    """Installs a plugin for one test: `install("id", "source of its module", "Requires-Dist: x", version="1.0")`."""
    site = tmp_path.parent / f"{tmp_path.name}-site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def put(id, source, *headers, version="1.0"):
        info = site / f"axcore_thrown_{id}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: axcore-thrown-{id}", f"Version: {version}", *headers]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "entry_points.txt").write_text(f"[axcore.plugins]\n{id} = axcore_thrown_{id}\n")
        (site / f"axcore_thrown_{id}.py").write_text(source)
        importlib.invalidate_caches()
        registry.cache_clear()

    yield put
    for name in [name for name in sys.modules if name.startswith("axcore_thrown_")]:
        del sys.modules[name]
