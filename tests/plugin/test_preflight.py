"""Incompatible versions of jax and flax raise before flax is imported."""

import json
import os
import subprocess
import sys

import pytest

from axcore import preflight

SUBPACKAGES = ("module", "parallel", "nn", "train", "infer", "aot", "testing")


@pytest.fixture
def versions(tmp_path, monkeypatch):
    """Pretends that these versions are installed: `versions(flax="0.12.8")`."""

    def install(**found):
        for name, version in found.items():
            info = tmp_path / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


@pytest.mark.parametrize(
    ("jax", "flax"),
    [("0.11.1", "0.12.9"), ("0.11.2", "0.12.12"), ("0.12.0.1", "0.12.12"), ("1.0", "0.13.0rc1"), ("0.11.1.dev1", "1")],
)
def test_supported_versions_pass(versions, jax, flax):
    versions(jax=jax, flax=flax)
    assert preflight.bad_pair() == ""


@pytest.mark.parametrize(
    ("jax", "flax"), [("0.11.2", "0.12.8"), ("0.11.0", "0.12.9"), ("0.9", "0.12.9"), ("0.10.2", "0.12.4"), ("?", "1")]
)
def test_the_error_names_both_versions_and_the_pip_command(versions, jax, flax):
    versions(jax=jax, flax=flax)
    assert preflight.bad_pair() == (
        f"jax {jax} and flax {flax} are installed, but axcore requires jax>=0.11.1 and flax>=0.12.9: "
        "pip install -U 'jax>=0.11.1' 'flax>=0.12.9'"
    )


def test_missing_packages_are_reported(monkeypatch):
    monkeypatch.setattr("importlib.metadata.Distribution.from_name", staticmethod(_absent))
    assert preflight.bad_pair().startswith("no jax and no flax are installed, but axcore requires ")


def _absent(name):
    import importlib.metadata

    raise importlib.metadata.PackageNotFoundError(name)


def test_every_subpackage_raises_before_it_imports_flax(versions, tmp_path):
    versions(flax="0.12.8")
    code = f"""
import importlib, json, sys
found = {{}}
for name in {SUBPACKAGES!r}:
    try:
        importlib.import_module("axcore." + name)
        found[name] = "imported"
    except Exception as error:
        found[name] = f"{{type(error).__name__}}: {{error}}"
    found[name] += " and flax" * ("flax" in sys.modules)
print(json.dumps(found))
"""
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    for name in SUBPACKAGES:
        assert told[name].startswith("AxcoreError: jax "), told
        assert told[name].endswith("pip install -U 'jax>=0.11.1' 'flax>=0.12.9'"), told
