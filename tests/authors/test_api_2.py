"""Plugins written for API 1 migrate to API 2 with few changed lines, as docs/plugins/api_2.md describes.

`api_1/KIND` is what `axcore new-plugin` wrote for API 1; `api_1/KIND.patch` is the migration.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from .test_pages import QUICK

pytestmark = pytest.mark.long

API_1 = pathlib.Path(__file__).parent / "api_1"
LINES = {
    "attention": (13, 1),
    "kv_cache": (16, 3),
    "layer": (2, 0),
    "parallelism": (3, 0),
    "quantizer": (10, 3),
    "recipe": (2, 0),
}
"""Lines that change in the plugin and in its tests. A changed line counts once."""


def changed_lines(patch):
    """(changed lines in the plugin, changed lines in its tests)."""
    counts = {"src": 0, "tests": 0}
    for file in re.split(r"^diff --git a/", patch, flags=re.MULTILINE)[1:]:
        for run in re.findall(r"(?:^[-+](?![-+]).*\n)+", file, re.MULTILINE):
            counts[file.partition("/")[0]] += max(len(re.findall(rf"^\{sign}", run, re.MULTILINE)) for sign in "-+")
    return counts["src"], counts["tests"]


def moved(kind, folder):
    """Migrates a plugin to API 2 in `folder`. Returns the environment variables with which it is installed."""
    shutil.copytree(API_1 / kind, folder, dirs_exist_ok=True)
    subprocess.run(["git", "apply", str(API_1 / f"{kind}.patch")], cwd=folder, check=True)
    name = f"new-{kind.replace('_', '-')}"
    (package,) = (folder / "src").iterdir()
    assert "axcore_api = 2" in (package / "plugin.py").read_text()
    info = folder / "src" / f"{package.name}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: axcore-{name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[axcore.plugins]\n{name} = {package.name}.plugin\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "src"), *filter(None, sys.path)])}


@pytest.mark.parametrize("kind", LINES)
def test_migration_changes_few_lines(kind):
    assert changed_lines((API_1 / f"{kind}.patch").read_text()) == LINES[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", LINES)
def test_a_migrated_plugin_passes_its_suite(kind, tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests", *QUICK.split(" ", 1)]
    command[-1] = command[-1].strip("'")
    done = subprocess.run(command, cwd=tmp_path, env=moved(kind, tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
