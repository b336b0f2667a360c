"""Every page of docs/plugins works as written: its files, its commands and the plugin's own tests."""

import re
import venv

import jax
import pytest

import axcore as ax
from axcore import nn
from axcore.cli.new_plugin import KINDS, TEMPLATES
from axcore.config.node import default, field_names

from .pages import DOCS, Command, File, Machine, steps

pytestmark = pytest.mark.long

NIGHTLY = ("gradients", "eight_devices", "bfloat16", "remat", "unrolled", "vmap", "rows")
QUICK = f"-k '{' and '.join(f'not {each}' for each in NIGHTLY)}'"
"""A pytest option that deselects the slowest tests of a plugin. The nightly run has all tests."""
PAGES = {page.stem: page for page in sorted(DOCS.glob("*.md")) if any(isinstance(each, File) for each in steps(page))}


@pytest.fixture(scope="session")
def pip(tmp_path_factory):
    """A Python that has pip."""
    folder = tmp_path_factory.mktemp("pip")
    venv.create(folder, with_pip=True, symlinks=True)
    return folder / "bin" / "python"


# Their suites take a minute each.
LENGTHY = ("attention", "kv_cache", "layer", "numerics", "parallelism", "recipe", "recurrent", "training")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LENGTHY else name for name in PAGES]
)
@pytest.mark.parametrize("checks", [QUICK, pytest.param("", marks=pytest.mark.slow)], ids=["quick", "whole"])
def test_a_reader_gets_what_the_page_shows(name, checks, pip, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    Machine(folder, pip, checks).follow(PAGES[name])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in PAGES])
def test_the_page_of_each_kind_creates_installs_and_tests_a_plugin(kind):
    found = steps(PAGES[kind])
    files = [step.path for step in found if isinstance(step, File)]
    commands = [step.line for step in found if isinstance(step, Command)]
    first, install, test = commands[:3]
    name = first.split()[2]
    assert first == f"axcore new-plugin {name} --kind {kind}"
    assert install == f"pip install -e './{name}[test]'"
    assert test == f"pytest ./{name}"
    (loaded,) = [step for step in found if isinstance(step, Command) and step.line == f"axcore plugins {name} --json"]
    assert '"state": "loaded",' in [line.strip() for line in loaded.shown]
    package = f"{name}/src/axcore_{name.replace('-', '_')}"
    assert f"{package}/plugin.py" in files
    assert any(path.startswith(f"{name}/tests/test_") for path in files)
    modules = [path for path in files if path.startswith(package)]
    assert len(modules) == (4 if kind == "parallelism" else 2), "expected plugin.py and one module for each offer"


def test_case_the_small_kinds_are_the_code_of_their_page():
    """`new-plugin` has every kind: those without a page of their own are the parts of the plugin on one page."""
    parts = {step.path.rpartition("/")[2]: step.content for step in steps(PAGES["training"]) if isinstance(step, File)}
    kinds = [kind for kind in KINDS if kind not in PAGES]
    assert kinds == ["optimizer", "input", "callback", "evaluator", "command"]
    for kind in kinds:
        package = TEMPLATES / kind / "src" / f"axcore_new_{kind}"
        (module,) = [path for path in package.glob("*.py") if path.name not in ("__init__.py", "plugin.py")]
        assert module.read_text().replace("new-command", "count") == parts[module.name]


def test_the_list_of_core_layers_has_their_fields_and_defaults():
    page = (DOCS / "building_blocks.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .* \|$", page.partition("## The core's layers")[2], re.MULTILINE)
    with_pages_of_their_own = nn.AttentionKernel, nn.KVCache, nn.Numerics
    layers = [each for each in map(vars(nn).get, nn.__all__) if isinstance(each, type) and issubclass(each, ax.Layer)]
    assert {name for name, _ in rows} == {
        each.__name__ for each in layers if not issubclass(each, with_pages_of_their_own) and each is not nn.Stock
    }
    for name, listed in rows:
        cls = getattr(nn, name).Config
        fields = dict((field.partition("=")[::2]) for field in re.findall(r"`([^`]+)`", listed))
        known = ("dtypes", "tags")
        if listed.startswith("those of BaseAttention, and "):
            known += field_names(nn.BaseAttention.Config)
        assert list(fields) == [field for field in field_names(cls) if field not in known], name
        for field, value in fields.items():
            if value:
                expected = eval(value, {**vars(nn), "jax": jax})  # the page's own text
                assert default(cls, field) == expected, f"{name}.{field}"
