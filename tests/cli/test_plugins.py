"""`axcore plugins NAME`, `--json`, `--write-allowlist`, and `axcore doctor`."""

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib

import pytest

from axcore.cli import doctor
from axcore.plugin import API_VERSION, registry

BROKEN = "raise RuntimeError('no good today')\n"
OLD = """
from axcore.plugin import Feature, Recipe, hookimpl

axcore_api = 2

@hookimpl
def axcore_features():
    return [Feature("old", "axcore_thrown_old:absent", "An old feature.")]
"""


@pytest.fixture
def install(monkeypatch, tmp_path, fresh_registry):
    """Installs a plugin for one test: `install("id", "source of its module", "Requires-Dist: x", version="1.0")`."""
    site = tmp_path.parent / f"{tmp_path.name}-site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))  # for the process that doctor starts

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


# axcore plugins


def test_json_has_every_plugin_with_every_field(axcore, install):
    install("old", OLD, "Project-URL: Homepage, https://example.org/old", version="2.5")
    install("broken", BROKEN)
    done = axcore("plugins", "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["schema"], found["api"], found["conflicts"]) == (1, API_VERSION, [])
    plugins = {plugin["id"]: plugin for plugin in found["plugins"]}
    assert list(plugins) == sorted(registry().plugins)
    assert plugins["old"] == {
        "id": "old",
        "distribution": "axcore-thrown-old",
        "version": "2.5",
        "homepage": "https://example.org/old",
        "module": "axcore_thrown_old",
        "api": API_VERSION,
        "state": "loaded",
        "reason": "",
        "detail": "",
        "offers": [
            {"kind": "feature", "name": "old", "summary": "An old feature.", "target": "axcore_thrown_old:absent"}
        ],
    }
    broken = plugins["broken"]
    assert (broken["state"], broken["reason"], broken["offers"]) == ("failed", "RuntimeError: no good today", [])
    assert broken["detail"].startswith("Traceback (most recent call last)") and broken["homepage"] is None
    assert {kind["kind"] for kind in plugins["core"]["offers"]} >= {"attention kernel", "kv cache", "optimizer"}


def test_json_of_one_plugin_has_the_same_form(axcore):
    (rope,) = json.loads(axcore("plugins", "rope", "--json").out)["plugins"]
    assert rope["id"] == "rope"
    assert json.loads(axcore("plugins", "axcore-rope", "--json").out)["plugins"] == [rope]


def test_a_plugin_is_shown_with_its_offers_or_its_traceback(axcore, install):
    install("broken", BROKEN)
    install("old", OLD)
    lines = axcore("plugins", "old").out.splitlines()
    assert lines[0].split() == ["plugin", "old"]
    assert any(line.split() == ["distribution", "axcore-thrown-old", "1.0"] for line in lines)
    assert any(line.split(maxsplit=2)[:2] == ["feature", "old:"] for line in lines)
    done = axcore("plugins", "broken")
    assert done.code == 0
    assert "failed: RuntimeError: no good today" in done.out and "Traceback (most recent call last)" in done.out


def test_the_options_of_a_plugin_are_shown_with_their_defaults(axcore, install):
    found = axcore("plugins", "rope").out
    assert '\n                theta=10000.0, layout="half", rotary_dim=None, scaling=None' in found
    assert "\n                max_len, init=Normal(), where=axcore.nn.causal_lm.CausalLM\n" in found
    # The options of a slot offer are the fields of its class.
    assert "chunk=1024, block=256, where=None\n" in axcore("plugins", "core").out
    install("old", OLD)
    assert "  the options are unknown: " in axcore("plugins", "old").out


def test_an_unknown_plugin_suggests_one(axcore):
    assert "no plugin 'roep' is installed. Did you mean 'rope'?" in axcore("plugins", "roep").message


def test_an_allowlist_is_written_and_applied(axcore, install, monkeypatch):
    install("old", OLD)
    done = axcore("plugins", "--write-allowlist", "allow.toml")
    assert (done.code, done.out) == (0, "allow.toml\n")
    assert "axcore: left out axcore-thrown-old: axcore-thrown-old 1.0 has no RECORD" in done.err
    with open("allow.toml", "rb") as file:
        assert "axcore" not in {entry["name"] for entry in tomllib.load(file).get("distribution", [])}
    monkeypatch.setenv("AXCORE_ALLOWLIST", "allow.toml")
    registry.cache_clear()
    (old,) = json.loads(axcore("plugins", "old", "--json").out)["plugins"]
    assert old["state"] == "disabled" and "axcore-thrown-old is not in allow.toml" in old["reason"]
    assert "cannot write" in axcore("plugins", "--write-allowlist", "no/such/folder").message


def test_listing_plugins_imports_neither_jax_nor_flax():
    code = "import sys, axcore.cli\naxcore.cli.main(['plugins', '--json'])\nassert not {'jax', 'flax'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# axcore doctor


@pytest.fixture
def light(monkeypatch):
    """Runs the checks that import jax in this process."""
    monkeypatch.setattr(doctor, "_backends_and_offers", doctor._check_backends_and_offers)


def lines(done, check):
    return [line for line in done.out.splitlines() if line[7:].startswith(check)]


def test_a_valid_installation_has_no_wrong_findings(axcore, light, monkeypatch):
    for variable in [name for name in os.environ if name.startswith("AXCORE_")]:
        monkeypatch.delenv(variable)
    found = json.loads(axcore("doctor", "--json").out)
    assert found["schema"] == 1
    findings = {}
    for finding in found["findings"]:
        findings.setdefault(finding["check"], []).append((finding["status"], finding["message"]))
    assert findings["python"][0][0] == "ok" and ".".join(map(str, sys.version_info[:3])) in findings["python"][0][1]
    ((status, message),) = findings["jax and flax"]
    assert status == "ok" and f"flax {importlib.metadata.version('flax')}" in message
    assert findings["backend"][0][0] == "ok" and findings["backend"][0][1].startswith("cpu: ")
    assert ("ok", f"rope (axcore-rope {importlib.metadata.version('axcore-rope')}) is loaded") in findings["plugin"]
    assert found["ok"] == all(finding["status"] != "wrong" for finding in found["findings"])


def test_broken_plugins_and_conflicts_are_reported(axcore, install, light):
    install("broken", BROKEN)
    install("newer", "axcore_api = 99\n")
    install("absent", "from axcore.plugin import Unavailable\nraise Unavailable('no TPU here')\n")
    for id in ("old", "older"):
        install(id, OLD)
    done = axcore("doctor")
    assert (done.code, done.err) == (1, "")
    for line in (
        "wrong  plugin        broken (axcore-thrown-broken 1.0) is failed: RuntimeError: no good today",
        "wrong  plugin        newer (axcore-thrown-newer 1.0) is incompatible: it needs plugin API 99; "
        f"this axcore has {API_VERSION}",
        "note   plugin        absent (axcore-thrown-absent 1.0) is unavailable: no TPU here",
    ):
        assert line in done.out.splitlines()
    assert any("'old' is offered by old" in line and line.startswith("wrong") for line in lines(done, "plugins"))


def test_disabled_plugins_are_notes(axcore, install, light, monkeypatch):
    install("broken", BROKEN)
    monkeypatch.setenv("AXCORE_DISABLE", "broken")
    monkeypatch.setenv("AXCORE_PLUGINS", "")  # this test ignores the other plugins
    registry.cache_clear()
    done = axcore("doctor")
    assert done.code == 0, done
    assert "note   environment   AXCORE_DISABLE=broken" in done.out
    assert "note   environment   AXCORE_PLUGINS= (empty: no plugin is loaded)" in done.out
    assert "plugin 'recipes' (axcore-recipes" in axcore("recipes").out
    assert "note   plugin        broken (axcore-thrown-broken 1.0) is disabled: by AXCORE_DISABLE" in done.out


def test_required_versions_are_compared_with_the_installed_ones(axcore, install, light):
    install(
        "old",
        OLD,
        "Requires-Dist: axcore>=99",
        "Requires-Dist: jax>=0.11",
        "Requires-Dist: no-such-thing",
        "Requires-Dist: other-thing; sys_platform == 'plan9'",
        "Requires-Dist: extra-thing; extra == 'more'",
        "Requires-Dist: ???",
    )
    done = axcore("doctor")
    here = importlib.metadata.version("axcore")
    assert lines(done, "versions") == [
        f"wrong  versions      axcore-thrown-old 1.0 requires axcore>=99, but axcore {here} is installed",
        "wrong  versions      axcore-thrown-old 1.0 requires no-such-thing, but none is installed",
        "note   versions      axcore-thrown-old 1.0 requires '???', which cannot be read",
    ]
    assert done.code == 1


def test_an_unsupported_pair_is_reported_without_importing_jax(axcore, install, monkeypatch, tmp_path):
    install("old", OLD)
    info = tmp_path.parent / f"{tmp_path.name}-site" / "flax-0.12.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flax\nVersion: 0.12.8\n")
    monkeypatch.delitem(sys.modules, "axcore.preflight", raising=False)
    monkeypatch.setattr(doctor, "_backends_and_offers", lambda: pytest.fail("jax was used"))
    done = axcore("doctor")
    assert done.code == 1
    (line,) = lines(done, "jax and flax")
    assert line.startswith("wrong") and "flax 0.12.8 are installed, but axcore requires" in line


def test_a_failing_backend_and_a_missing_offer_target_are_reported(install, monkeypatch):
    install("old", OLD)
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    monkeypatch.setenv("AXCORE_PLUGINS", "old")
    found = [(finding.check, finding.status, finding.message) for finding in doctor._backends_and_offers()]
    assert found[0][:2] == ("backend", "wrong") and "nonsense" in found[0][2]
    assert any(
        check == "offers" and status == "wrong" and "the feature 'old' of axcore-thrown-old 1.0 could not be" in message
        for check, status, message in found
    )


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo noise\necho 'last words' >&2\nkill -ABRT $$", "exited with -6: last words"),
        ("exec sleep 30", "no devices within 0.2 s"),
    ],
)
def test_a_backend_that_crashes_or_hangs_is_reported(monkeypatch, tmp_path, script, told):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    if "sleep" in script:
        monkeypatch.setattr(doctor, "TIMEOUT_S", 0.2)
    (finding,) = doctor._backends_and_offers()
    assert (finding.check, finding.status) == ("backend", "wrong") and told in finding.message
