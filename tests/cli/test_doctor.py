"""`axcore doctor`: the installation, and what plugins do at import."""

import importlib.metadata
import json
import os
import sys

import pytest

from axcore.doctor import findings as plugin_findings, installation
from axcore.plugin import API_VERSION

FEATURE = """
from axcore.plugin import Feature, hookimpl

@hookimpl
def axcore_features():
    return [Feature({id!r}, {target!r}, "A feature.")]
"""
OLD = FEATURE.format(id="old", target="axcore_thrown_old:absent")


@pytest.fixture
def light(monkeypatch):
    """Checks the backends in this process, and no targets of offers."""
    monkeypatch.setattr(installation, "_backends", installation._check_backends)
    monkeypatch.setattr(plugin_findings, "targets", lambda *_: iter(()))


@pytest.fixture
def only(install, monkeypatch):
    """Installs plugins, id -> source, and disables all others."""

    def put(**sources):
        for id, source in sources.items():
            install(id, source)
        monkeypatch.setenv("AXCORE_PLUGINS", ",".join(sources))

    return put


def lines(done, check):
    return [line for line in done.out.splitlines() if line[9:].startswith(check)]


def test_a_valid_installation_has_no_wrong_findings(axcore, light, monkeypatch):
    for variable in [name for name in os.environ if name.startswith("AXCORE_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AXCORE_PLUGINS", "rope,mesh-rules")
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
    ((status, message),) = findings["mesh rules"]
    assert status == "ok" and "has rules for cpu-*, gpu-*, gpu-a100-*" in message


def test_broken_plugins_and_conflicts_are_reported(axcore, only, light):
    absent = "from axcore.plugin import Unavailable\nraise Unavailable('no TPU here')\n"
    broken = "raise RuntimeError('no good today')\n"
    only(broken=broken, newer="axcore_api = 99\n", absent=absent, old=OLD, older=OLD)
    done = axcore("doctor")
    assert (done.code, done.err) == (1, "")
    for line in (
        "wrong    plugin        broken (axcore-thrown-broken 1.0) is failed: RuntimeError: no good today",
        "wrong    plugin        newer (axcore-thrown-newer 1.0) is incompatible: axcore_api=99, but "
        f"this axcore has plugin API {API_VERSION}. Install a later axcore, or an earlier version of the plugin",
        "note     plugin        absent (axcore-thrown-absent 1.0) is unavailable: no TPU here",
    ):
        assert line in done.out.splitlines()
    assert any("'old' is offered by old" in line and line.startswith("wrong") for line in lines(done, "plugins"))


def test_disabled_plugins_are_not_imported_and_are_notes(axcore, install, light, monkeypatch, tmp_path):
    install("broken", f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.setenv("AXCORE_DISABLE", "broken")
    monkeypatch.setenv("AXCORE_PLUGINS", "")  # this test ignores the other plugins
    done = axcore("doctor")
    assert done.code == 0, done
    assert "note     environment   AXCORE_DISABLE=broken" in done.out
    assert "note     environment   AXCORE_PLUGINS='', so no plugin is loaded" in done.out
    assert "plugin 'recipes' (axcore-recipes" in axcore("recipes").out
    assert "note     plugin        broken (axcore-thrown-broken 1.0) is disabled: by AXCORE_DISABLE" in done.out
    assert not (tmp_path / "imported").exists()


def test_required_versions_are_compared_with_the_installed_ones(axcore, install, light, monkeypatch):
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
    monkeypatch.setenv("AXCORE_PLUGINS", "old")
    done = axcore("doctor")
    here = importlib.metadata.version("axcore")
    assert lines(done, "versions") == [
        f"wrong    versions      axcore-thrown-old 1.0 requires axcore>=99, but axcore {here} is installed",
        "wrong    versions      axcore-thrown-old 1.0 requires no-such-thing, but none is installed",
        "note     versions      axcore-thrown-old 1.0 requires '???', which cannot be read",
    ]
    assert done.code == 1


def test_an_unsupported_pair_is_reported_without_importing_jax(axcore, install, monkeypatch, tmp_path):
    install("old", OLD)
    info = tmp_path.parent / f"{tmp_path.name}-site" / "flax-0.12.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flax\nVersion: 0.12.8\n")
    monkeypatch.setenv("AXCORE_PLUGINS", "old")
    monkeypatch.delitem(sys.modules, "axcore.preflight", raising=False)
    monkeypatch.setattr(installation, "_backends", lambda: pytest.fail("jax was used"))
    monkeypatch.setattr(plugin_findings, "targets", lambda *_: pytest.fail("jax was used"))
    done = axcore("doctor")
    assert done.code == 1
    (line,) = lines(done, "jax and flax")
    assert line.startswith("wrong") and "flax 0.12.8 are installed, but axcore requires" in line


def test_a_failing_backend_is_reported(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    (found,) = installation._backends()
    assert (found.check, found.status) == ("backend", "wrong") and "nonsense" in found.message


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
        monkeypatch.setattr(installation, "TIMEOUT_S", 0.2)
    (finding,) = installation._backends()
    assert (finding.check, finding.status) == ("backend", "wrong") and told in finding.message


# What plugins do at import

PATCH = """
from axcore.nn import RMSNorm
before = RMSNorm.__call__

def doubled(self, x):
    return 2 * before(self, x)

RMSNorm.__call__ = doubled
"""
THREAD = """
import threading

def fail():
    raise RuntimeError("alone")

threading.Thread(target=fail, name="watcher").start()
"""
FORK = "import os\nif os.fork() == 0:\n    raise RuntimeError('I am a child')\n"


def findings(found, id):
    """(status, message) of each finding about a plugin, without its name."""
    name = f"{id} (axcore-thrown-{id} 1.0)"
    return [(each.status, each.message.removeprefix(name).lstrip(": ")) for each in found if each.plugin == id]


def test_case_each_import_that_misbehaves_is_named(only, monkeypatch):
    monkeypatch.setattr(plugin_findings, "SLOW_S", 1.5)
    monkeypatch.setattr(plugin_findings, "HOOKS_S", 20)
    only(
        slow="import time\ntime.sleep(1.6)\n",
        loud="print('first line\\n' + 'x' * 10_000_000)\n",
        thread=THREAD,
        fork=FORK,
        leaves="import sys\nsys.exit(3)\n",
        ends="import os\nprint('last words')\nos._exit(4)\n",
        aborts="import os\nos.abort()\n",
        settings="import os\nos.environ['XLA_FLAGS'] = '--none'\nos.environ['OTHER'] = ''\n",
        polite=FEATURE.format(id="polite", target="math:sqrt"),
    )
    registry, found = plugin_findings.discover()
    loaded = ("ok", "is loaded")

    def only_finding(id):
        first, second = findings(found, id)
        assert first == loaded
        return second

    status, message = only_finding("slow")
    assert status == "warning" and 1.6 <= float(message.split()[3]) < 20, message
    status, message = only_finding("loud")
    assert status == "warning" and message.startswith("its import prints 10,000,012 bytes: 'first line xxx")
    assert len(message) < 250
    status, message = only_finding("thread")
    assert status == "wrong" and "starts a thread that fails: watcher: RuntimeError: alone." in message
    status, message = only_finding("fork")
    assert status == "wrong" and "the new process continues in axcore with RuntimeError: I am a child." in message
    assert only_finding("settings") == (
        "warning",
        "its import changes XLA_FLAGS for the whole process. Leave it to the user",
    )
    assert findings(found, "leaves") == [("wrong", "is failed: SystemExit: 3")]
    assert findings(found, "ends") == [
        ("wrong", "is failed: its import ends the process with exit code 4. A module must raise an exception instead")
    ]
    ((status, message),) = findings(found, "aborts")
    assert status == "wrong" and "ends the process with signal SIGABRT" in message
    assert findings(found, "polite") == [loaded]
    assert [offer.name for offer in registry.plugins["polite"].offers] == ["polite"]


def test_case_an_import_that_does_not_finish_is_ended(only, monkeypatch):
    monkeypatch.setattr(plugin_findings, "HOOKS_S", 1)
    only(hangs="import os, time\nos.fork()\ntime.sleep(100)\n")
    _, found = plugin_findings.discover()
    ((status, message),) = findings(found, "hangs")
    assert status == "wrong" and "its import does not finish within 1 s." in message


def test_case_a_plugin_that_starts_jax_or_changes_the_core_is_named(only, tmp_path):
    only(patch=PATCH + "import jax\njax.devices()\njax.config.update('jax_enable_x64', True)\n")
    _, found = plugin_findings.discover()
    told = findings(found, "patch")
    source = tmp_path.parent / f"{tmp_path.name}-site" / "axcore_thrown_patch.py"
    (patched,) = [message for status, message in told if "RMSNorm" in message and status == "wrong"]
    assert f"replaces axcore.nn.norm.RMSNorm.__call__ ({source}:5), for everyone" in patched
    assert any("starts the backends of jax" in message and status == "wrong" for status, message in told)
    assert any("its import loads jax (" in message and status == "warning" for status, message in told)
    assert any("changes jax_enable_x64=True" in message for _, message in told)


def test_case_targets_that_misbehave_are_named_and_the_others_are_checked(only):
    only(
        absent=FEATURE.format(id="absent", target="axcore_thrown_none:f"),
        bends=BENT + FEATURE.format(id="bends", target="axcore_thrown_bends:f.g") + PATCHING,
        ends=FEATURE.format(id="ends", target="axcore_thrown_ends:f.g") + ENDING,
        polite=FEATURE.format(id="polite", target="math:sqrt"),
    )
    registry, before = plugin_findings.discover()
    assert all(each.status == "ok" or "disabled" in each.message or each.plugin == "bends" for each in before), before
    assert "replaces axcore.config.node.Config.own (" in findings(before, "bends")[1][1]
    found = [*plugin_findings.targets(registry, before)]
    ((status, message),) = findings(found, "bends")  # without what its module replaces
    assert status == "wrong" and "the import of its targets replaces axcore.config.node.Config.fill (" in message
    ((status, message),) = findings(found, "ends")
    assert status == "wrong" and "the import of its targets ends the process with exit code 5" in message
    (absent,) = [each for each in found if each.check == "offers"]
    assert absent.status == "wrong"
    assert "the feature 'absent' of axcore-thrown-absent 1.0 could not be loaded" in absent.message
    assert findings(found, "polite") == []


CHECKS = """
from axcore.plugin import Check, hookimpl

@hookimpl
def axcore_checks():
    return [Check(name, f"axcore_thrown_checks:{name}", "") for name in ("driver", "fails")]

def driver():
    yield "the driver is too old"
    yield "there is no license"

def fails():
    return 1 / 0
"""


def test_case_what_the_checks_of_a_plugin_find_is_reported(only):
    only(checks=CHECKS)
    registry, before = plugin_findings.discover()
    found = [*plugin_findings.targets(registry, before)]
    name = "checks (axcore-thrown-checks 1.0)"
    assert [each.message for each in found if each.status == "wrong"] == [
        f"{name}: the driver is too old",
        f"{name}: there is no license",
        "the check 'fails' of axcore-thrown-checks 1.0 failed: ZeroDivisionError: division by zero",
    ]


BENT = "from axcore.config import Config\nConfig.own = lambda self: self\n"
PATCHING = """
def __getattr__(name):
    if name == "f":
        from axcore.config import Config
        Config.fill = lambda self, **values: self
        return type("f", (), {"g": 1})
    raise AttributeError(name)
"""
ENDING = """
def __getattr__(name):
    if name == "f":
        import os
        os._exit(5)
    raise AttributeError(name)
"""


def test_case_a_plugin_that_prints_much_is_capped_and_named(axcore, only):
    only(loud="print('first line\\n' + 'x' * 10_000_000)\n", quiet="print('hello')\n")
    done = axcore("plugins")
    assert done.code == 0 and "hello\n" in done.err and "first line\n" in done.err
    assert len(done.err) < 1000
    assert "axcore: axcore-thrown-loud 1.0 printed 10,000,012 characters at import" in done.err
