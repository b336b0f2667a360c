"""Folders whose configs name classes that this process has not imported yet."""

import json
import sys

import pytest

from axcore.config import ConfigError
from axcore.plugin import PluginError, registry
from axcore.train import ModelFolder

LAYER = """
import axcore as ax

class Gate(ax.Layer):
    class Config(ax.Layer.Config):
        size: int = ax.REQUIRED
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """(package, entry point group) -> installs a distribution whose layer is in `package.layers`."""

    def install(package, group):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / "layers.py").write_text(LAYER)
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{package} = {package}:FAMILY\n")

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    for name in [name for name in sys.modules if name.startswith("case_")]:
        del sys.modules[name]


def saved(folder, package, module="layers"):
    config = {"$type": f"{package}.{module}.Gate", "size": 3, "dtypes": None, "tags": []}
    (folder / "config.json").write_text(json.dumps({"plugins": {}, "config": config}))
    return folder


def test_case_the_code_of_a_registered_family_is_imported(installed, tmp_path):
    installed("case_family", "axcore_hf.families")
    assert ModelFolder.open(saved(tmp_path, "case_family")).model.size == 3


def test_case_a_saved_config_cannot_name_unregistered_code(installed, tmp_path):
    installed("case_other", "console_scripts")
    with pytest.raises(ConfigError, match=r"'case_other\.layers\.Gate' is not a config type of this process"):
        ModelFolder.open(saved(tmp_path, "case_other"))
    assert not any(name.startswith("case_other") for name in sys.modules)


@pytest.mark.parametrize("module", ["__main__", "__main__.json"])
def test_a_saved_config_cannot_run_a_program(installed, tmp_path, module):
    installed("case_program", "axcore_hf.families")
    (tmp_path / "case_program" / "__main__.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ConfigError, match=r"__main__.*\.Gate' is not a config type of this process"):
        ModelFolder.open(saved(tmp_path, "case_program", module))


def test_an_error_of_the_code_of_a_saved_config_names_the_class(installed, tmp_path):
    installed("case_broken", "axcore_hf.families")
    (tmp_path / "case_broken" / "layers.py").write_text("1 / 0\n")
    with pytest.raises(PluginError, match=r"case_broken\.layers\.Outer\.Gate, which the saved config names, could not"):
        ModelFolder.open(saved(tmp_path, "case_broken", "layers.Outer"))


def test_case_an_allowlist_also_holds_for_saved_configs(installed, tmp_path, monkeypatch):
    installed("case_unlisted", "axcore_hf.families")
    (tmp_path / "allowed.toml").write_text("")
    monkeypatch.setenv("AXCORE_ALLOWLIST", str(tmp_path / "allowed.toml"))
    registry.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"'case_unlisted\.layers\.Gate' is not a config type"):
            ModelFolder.open(saved(tmp_path, "case_unlisted"))
    finally:
        registry.cache_clear()
