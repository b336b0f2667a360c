"""`axcore new-plugin`: it writes complete plugins, and an error leaves no files behind."""

import pathlib
import re
import subprocess
import sys

import pytest

from axcore.cli import new_plugin
from axcore.cli.new_plugin import KINDS, TEMPLATES

pytestmark = pytest.mark.long

ROOT = pathlib.Path(__file__).parents[2]


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_every_placeholder_is_replaced(axcore, tmp_path, kind):
    assert axcore("new-plugin", "my-2nd-thing", "--kind", kind).code == 0
    template = {path.relative_to(TEMPLATES / kind) for path in (TEMPLATES / kind).rglob("*") if path.is_file()}
    written = [path for path in (tmp_path / "my-2nd-thing").rglob("*") if path.is_file()]
    assert len(written) == len([path for path in template if path.suffix != ".pyc"])
    for path in written:
        placeholders = "|".join(KINDS).replace("_", "[-_]")
        assert not re.findall(rf"new[-_](?:{placeholders})", str(path) + path.read_text())
    project = (tmp_path / "my-2nd-thing/pyproject.toml").read_text()
    assert 'name = "axcore-my-2nd-thing"' in project
    assert 'my-2nd-thing = "axcore_my_2nd_thing.plugin"' in project
    assert (tmp_path / "my-2nd-thing/src/axcore_my_2nd_thing/plugin.py").is_file()
    assert left_in(tmp_path) == ["my-2nd-thing"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_readme_lists_what_to_replace(tmp_path, kind):
    folder = new_plugin.new_plugin("my-thing", kind, tmp_path)
    listed = (folder / "README.md").read_text().partition("## To make it yours")[2]
    files = [name for name in re.findall(r"`([^`\s]+)`", listed) if "." in name]
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(files) == written - {"README.md", "tests/conftest.py"}
    module, *_ = files
    examples = re.findall(r"`([A-Za-z_]+)`", listed)
    assert examples
    assert all(re.search(rf"(class|def) {name}\b", (folder / module).read_text()) for name in examples)


def test_the_last_lines_are_the_next_commands(axcore, tmp_path):
    told = axcore("new-plugin", "my-gate", "--kind", "layer").out.splitlines()
    assert told[0] == "wrote ./my-gate; next:"
    assert [line.strip() for line in told[2:]] == [
        "pip install -e './my-gate[test]'",
        "pytest ./my-gate",
        "axcore plugins my-gate",
        "",
        "README.md explains what to replace",
    ]


def test_the_plugin_id_omits_the_axcore_prefix(axcore, tmp_path):
    told = axcore("new-plugin", "axcore-my-gate", "--kind", "layer", "--out", tmp_path / "new" / "place").out
    folder = tmp_path / "new" / "place" / "axcore-my-gate"
    assert f"wrote {folder}; next:" in told and "axcore plugins my-gate" in told
    project = (folder / "pyproject.toml").read_text()
    assert 'name = "axcore-my-gate"' in project and 'my-gate = "axcore_my_gate.plugin"' in project


@pytest.mark.parametrize("name", ["My-Gate", "my_gate", "my gate", "2nd", "my-", "axcore-", "../up", "", "é"])
def test_invalid_names_raise(axcore, tmp_path, name):
    message = axcore("new-plugin", "--kind", "layer", "--", name).message
    assert "lowercase words joined by hyphens" in message and repr(name) in message
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("rope", r"the plugin 'rope' \(axcore-rope .*\) is already installed"),
        ("axcore-recipes", r"the plugin 'recipes' \(axcore-recipes .*\) is already installed"),
        ("core", r"the plugin 'core'"),
        ("contiguous", r"'core' \(axcore .*\) already offers the kv cache 'contiguous'"),
        ("quickstart", r"'recipes' \(axcore-recipes .*\) already offers the recipe 'quickstart'"),
    ],
)
def test_a_name_in_use_raises(axcore, tmp_path, name, reason):
    assert re.search(reason, axcore("new-plugin", name, "--kind", "layer").message)
    assert left_in(tmp_path) == []


def test_an_existing_package_raises(axcore, tmp_path, monkeypatch):
    (tmp_path / "axcore_lost.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "'axcore_lost' is already installed" in axcore("new-plugin", "lost", "--kind", "layer").message


def test_an_existing_folder_is_left_alone(axcore, tmp_path):
    (tmp_path / "my-gate").mkdir()
    (tmp_path / "my-gate/notes").write_text("mine")
    assert "my-gate already exists" in axcore("new-plugin", "my-gate", "--kind", "layer").message
    assert left_in(tmp_path / "my-gate") == ["notes"]


def test_an_unknown_kind_raises_and_lists_the_kinds(axcore, tmp_path):
    message = axcore("new-plugin", "my-gate", "--kind", "optimiser").message
    assert all(kind in message for kind in KINDS)
    assert "--kind" in axcore("new-plugin", "my-gate").message
    assert left_in(tmp_path) == []


def test_a_failed_write_leaves_no_files(axcore, tmp_path, monkeypatch):
    write_text, written = pathlib.Path.write_text, []

    def fail_at_the_third(self, *args, **kwargs):
        written.append(self)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return write_text(self, *args, **kwargs)

    monkeypatch.setattr(pathlib.Path, "write_text", fail_at_the_third)
    assert (
        "cannot write my-gate: [Errno 28] No space left" in axcore("new-plugin", "my-gate", "--kind", "layer").message
    )
    assert left_in(tmp_path) == []


def test_an_output_folder_that_is_a_file_raises(axcore, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write" in axcore("new-plugin", "my-gate", "--kind", "layer", "--out", "file").message


def test_new_plugins_pass_mypy_and_ruff_with_our_settings(tmp_path):
    sources = []
    for kind in KINDS:
        folder = new_plugin.new_plugin(f"my-{kind.replace('_', '-')}", kind, tmp_path)
        sources.append(str(folder / "src"))
    check = ["-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    done = subprocess.run([sys.executable, *check, *sources], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # Ruff resolves patterns relative to their settings file, so the relevant ones are repeated here.
    options = ["--config", str(ROOT / "pyproject.toml"), "--config", "lint.isort.known-first-party=['axcore*']"]
    for command in (["check", "--per-file-ignores", "**/tests/*:RUF012"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", *options, "."]
        done = subprocess.run(ruff, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
