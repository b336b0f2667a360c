"""`axcore plugins NAME`, `--json` and `--write-allowlist`; `axcore rules`."""

import json
import subprocess
import sys
import tomllib

from axcore.plugin import API_VERSION, registry

BROKEN = "raise RuntimeError('no good today')\n"
OLD = """
from axcore.plugin import Feature, Recipe, hookimpl

axcore_api = 2

@hookimpl
def axcore_features():
    return [Feature("old", "axcore_thrown_old:absent", "An old feature.")]
"""


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


def test_case_patterns_of_mesh_rules_are_listed(axcore):
    head, *rows = [line.split() for line in axcore("rules").out.splitlines()]
    assert head == ["accelerators", "mesh", "rule", "only", "for", "summary", "from"]
    listed = {row[0]: row[1] for row in rows}
    assert {"cpu-*": "cpu", "gpu-h100-*": "gpu-h100", "tpu-v5p-*": "tpu-v5p"}.items() <= listed.items()
    assert "mesh rule gpu-h100 for gpu-h100-*" in axcore("plugins").out
    assert "gpu-h100 for gpu-h100-*: NVIDIA H100" in axcore("plugins", "mesh-rules").out
    (found,) = json.loads(axcore("plugins", "mesh-rules", "--json").out)["plugins"]
    assert "gpu-h100-*" in {offer["pattern"] for offer in found["offers"]}
