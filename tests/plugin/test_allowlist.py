"""AXCORE_ALLOWLIST: a plugin that is not listed, or has changed since, is never imported."""

import base64
import hashlib
import sys

import pytest

from axcore.cli.listing import write_allowlist
from axcore.plugin import PluginError, State
from axcore.plugin.allowlist import Allowlist

GOOD = "@hookimpl\ndef axcore_features():\n    return [Feature('good', 'math:sqrt', 'Good.')]\n"


def hashed(content):
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def record(site, id, *more):
    """Writes the RECORD of a distribution like pip, with CRLF. Returns its path and its hash."""
    info = site.folder / f"ax_{id}-0.1.dist-info"
    files = [site.folder / f"thrown_ax_{id}.py", info / "METADATA", info / "entry_points.txt"]
    rows = [f"{file.relative_to(site.folder)},{hashed(file.read_bytes())},{file.stat().st_size}" for file in files]
    rows += [*more, f"{info.name}/RECORD,,"]
    path = info / "RECORD"
    path.write_bytes("".join(f"{row}\r\n" for row in rows).encode())
    return path, f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def table(name="ax-good", version="0.1", record="sha256:" + 64 * "0"):
    return f'[[distribution]]\nname = "{name}"\nversion = "{version}"\nrecord = "{record}"\n'


@pytest.fixture
def allow(site, tmp_path):
    """The plugins found with an allowlist of the given text: `allow(text)`."""

    def under(text):
        file = tmp_path / "allow.toml"
        file.write_text(text)
        return site.registry({"AXCORE_ALLOWLIST": str(file)}).plugins

    return under


def test_only_listed_distributions_are_imported(site, allow):
    site.install("good", GOOD)
    site.install("bad", "1 / 0")
    _, digest = record(site, "good")
    record(site, "bad")
    plugins = allow(table(name="Ax_Good", record=digest))  # names are compared as pip compares them
    assert plugins["good"].state is State.LOADED, plugins["good"].detail
    assert plugins["bad"].state is State.DISABLED
    assert plugins["bad"].detail.startswith("by AXCORE_ALLOWLIST: ax-bad is not in ")
    assert "thrown_ax_bad" not in sys.modules


def change_source(site):
    file = site.folder / "thrown_ax_good.py"
    file.write_text(file.read_text() + "evil = 1\n")


def change_record(site):
    file = site.folder / "ax_good-0.1.dist-info" / "RECORD"
    change_source(site)
    record(site, "good")
    assert file.exists()


def shadow_module(site):
    package = site.folder / "thrown_ax_good"
    package.mkdir()
    (package / "__init__.py").write_text("from axcore.plugin import *\n" + GOOD)


TAMPERING = {
    "changed source": (change_source, "thrown_ax_good.py of ax-good 0.1 does not match its hash in RECORD"),
    "changed source and RECORD": (change_record, "the RECORD of ax-good 0.1 does not have the hash in"),
    "no RECORD": (lambda site: (site.folder / "ax_good-0.1.dist-info" / "RECORD").unlink(), "has no RECORD"),
    "module from elsewhere": (shadow_module, "which the RECORD of ax-good 0.1 does not list"),
}


@pytest.mark.parametrize(("tamper", "told"), TAMPERING.values(), ids=TAMPERING.keys())
def test_a_changed_distribution_is_not_imported(site, allow, tamper, told):
    site.install("good", GOOD)
    _, digest = record(site, "good")
    tamper(site)
    plugin = allow(table(record=digest))["good"]
    assert plugin.state is State.DISABLED
    assert plugin.detail.startswith("by AXCORE_ALLOWLIST: ") and told in plugin.detail
    assert "thrown_ax_good" not in sys.modules


def test_another_version_is_not_imported(site, allow):
    site.install("good", GOOD)
    _, digest = record(site, "good")
    assert "allows ax-good 0.2, but 0.1 is installed" in allow(table(version="0.2", record=digest))["good"].detail


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("thrown_extra.py,,", "has no SHA-2 hash of thrown_extra.py"),
        ("thrown_extra.py,md5=rL0Y20zC-Fzt72VPzMSk2A,3", "has no SHA-2 hash of thrown_extra.py"),
        ("__pycache__/thrown_ax_good.cpython-312.pyc,,", ""),
    ],
)
def test_every_file_except_bytecode_requires_a_sha2_hash(site, allow, row, told):
    site.install("good", GOOD)
    (site.folder / "thrown_extra.py").write_text("foo")
    _, digest = record(site, "good", row)
    plugin = allow(table(record=digest))["good"]
    assert told in plugin.detail
    assert plugin.state is (State.DISABLED if told else State.LOADED)


def test_axcore_disable_overrides_the_allowlist(site, tmp_path):
    site.install("good", GOOD)
    _, digest = record(site, "good")
    (tmp_path / "allow.toml").write_text(table(record=digest))
    environ = {"AXCORE_ALLOWLIST": str(tmp_path / "allow.toml"), "AXCORE_DISABLE": "good"}
    assert site.registry(environ).plugins["good"].detail == "by AXCORE_DISABLE"


@pytest.mark.parametrize(
    "text",
    [
        "[[distribution]\n",
        "[distribution]\nname = 'x'\n",
        "[[distribution]]\nname = 'x'\nversion = '1'\n",
    ],
)
def test_an_invalid_allowlist_raises_and_nothing_is_imported(site, allow, text):
    site.install("good", GOOD)
    with pytest.raises(PluginError) as error:
        allow(text)
    for part in ("allow.toml cannot be read, so no plugin is imported", "tables with name, version and record"):
        assert part in str(error.value)
    assert "thrown_ax_good" not in sys.modules


@pytest.mark.parametrize("name", ["absent.toml", "", "."])
def test_an_unreadable_allowlist_raises_and_nothing_is_imported(site, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    site.install("good", GOOD)
    with pytest.raises(PluginError, match=r"AXCORE_ALLOWLIST=.* cannot be read, so no plugin is"):
        site.registry({"AXCORE_ALLOWLIST": name})
    assert "thrown_ax_good" not in sys.modules


# Writing an allowlist.


def test_write_allowlist_lists_plugins_and_returns_omitted_ones(site, tmp_path):
    site.install("good", GOOD)
    site.install("other", GOOD.replace("'good'", "'other'"))
    site.install("edited", GOOD.replace("'good'", "'edited'"))
    site.install("bare", GOOD.replace("'good'", "'bare'"))
    _, digest = record(site, "good")
    record(site, "other")
    record(site, "edited")
    (site.folder / "thrown_ax_edited.py").write_text("evil = 1\n")
    file = tmp_path / "allow.toml"
    left_out = write_allowlist(site.registry().plugins.values(), file)
    assert sorted(left_out) == ["ax-bare", "ax-edited"]
    assert "has no RECORD" in left_out["ax-bare"] and "does not match its hash" in left_out["ax-edited"]
    assert Allowlist.read(file).entries["ax-good"] == ("0.1", digest)
    states = {id: plugin.state for id, plugin in site.registry({"AXCORE_ALLOWLIST": str(file)}).plugins.items()}
    allowed = {id for id, state in states.items() if state is State.LOADED}
    assert allowed == {"good", "other"}
    with pytest.raises(PluginError, match="cannot write"):
        write_allowlist([], tmp_path / "no" / "such" / "folder.toml")
