"""What code of a plugin raises is told with the plugin's name; what it does at discovery harms nobody."""

import json
import signal
import sys

import pytest

from axcore.cli import main
from axcore.config import Config, ConfigError
from axcore.plugin import PluginError, State, recipe, registry, target, use, use_text
from axcore.plugin.faults import blaming

CODE = """
import axcore as ax

class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def fails(cfg=None, amount=1):
    raise KeyError("deep")

def leaves(cfg=None):
    raise SystemExit(3)

def silent(cfg=None):
    raise Silent

def takes_nothing():
    pass

def annotated(cfg, amount: "Nowhere" = 1):
    return cfg

def options(cfg, name="", feature="", kind=""):
    return cfg.set(name=name + feature + kind)

def text(arguments):
    return "0"

def argparse_like(arguments):
    raise SystemExit(7)
"""
NAMES = ("fails", "leaves", "silent", "takes_nothing", "annotated", "options", "text", "argparse_like")


class Node(Config):
    name: str = ""


@pytest.fixture
def code(alone):
    (alone.folder / "thrown_faulty.py").write_text(CODE)
    (alone.folder / "thrown_ends.py").write_text("raise SystemExit(4)\n")
    (alone.folder / "thrown_code.py").write_text("")
    hooks = "".join(
        f"@hookimpl\ndef axcore_{hook}():\n    return [{kind}(name, 'thrown_faulty:' + name, '') for name in {NAMES}]\n"
        for hook, kind in (("features", "Feature"), ("recipes", "Recipe"), ("commands", "Command"))
    )
    rule = (
        "@hookimpl\ndef axcore_mesh_rules():\n    return [MeshRule('r', 'thrown_faulty:fails', '', 'cpu-*'),"
        " MeshRule('s', 'thrown_ends:x', '', 'gpu-*')]\n"
    )
    alone.install("code", "from axcore.plugin import Command\n" + hooks + rule)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: use("fails")(Node()), r"feature 'fails' \(ax-code 0\.1\) failed at .*thrown_faulty\.py:9: KeyError: "),
        (lambda: use("leaves")(Node()), r"feature 'leaves' \(ax-code 0\.1\) failed at .*: SystemExit: 3"),
        (lambda: use("silent")(Node()), r"feature 'silent' .*: Silent: its text cannot be shown"),
        (lambda: use("takes_nothing")(Node()), r"feature 'takes_nothing' \(ax-code 0\.1\) failed: TypeError"),
        (lambda: use_text("annotated:amount=2"), r"feature 'annotated' \(ax-code 0\.1\): its options .*'Nowhere'"),
        (lambda: recipe("fails"), r"recipe 'fails' \(ax-code 0\.1\) failed at .*: KeyError: 'deep'"),
        (lambda: recipe("leaves"), r"recipe 'leaves' \(ax-code 0\.1\) failed at .*: SystemExit: 3"),
        (lambda: target("cpu-8")(Node()), r"target 'cpu-8', rule 'cpu-\*' \(ax-code 0\.1\) failed at .*: KeyError"),
        (lambda: target("gpu-h100-8"), r"mesh rule 's' of ax-code 0\.1 could not be loaded from .*: SystemExit: 4"),
    ],
)
def test_whatever_is_raised_names_the_plugin_the_offer_and_the_cause(code, call, told):
    with pytest.raises(PluginError, match=told) as error:
        call()
    assert error.value.__cause__ is not None


def test_ctrl_c_and_complete_errors_pass(code):
    for passing in (KeyboardInterrupt(), PluginError("complete")):
        with pytest.raises(type(passing)) as error, blaming("it"):
            raise passing
        assert error.value is passing


def test_commands_that_fail_are_named_and_exit_codes_are_numbers(code, capsys):
    assert main(["fails"]) == 2
    assert "command 'fails' (ax-code 0.1) failed at " in capsys.readouterr().err
    assert main(["text"]) == 2
    assert "command 'text' (ax-code 0.1) returned str, not an exit code" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="7"):
        main(["argparse_like"])


def test_options_may_have_any_name(code):
    assert use("options", name="a", feature="b", kind="c")(Node()).name == "abc"
    assert use_text("options:name=a,kind=c")(Node()).name == "ac"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("options:name=a,name=b", "gives the option 'name' twice"),
        ("options:name=(a", "the '(' in 'name=(a' is not closed"),
        ("options:name=a),kind=b", "the ')' in 'name=a),kind=b' closes no bracket"),
        ("options:name=[a)", "the ')' in 'name=[a)' closes no bracket"),
    ],
)
def test_options_given_twice_and_stray_brackets_are_refused(code, text, told):
    with pytest.raises(ConfigError) as error:
        use_text(text)
    assert told in str(error.value)


def test_what_plugins_print_does_not_get_into_what_the_program_prints(alone, capsys):
    alone.install("loud", "print('imported')\n@hookimpl\ndef axcore_features():\n    print('asked')\n    return []\n")
    assert main(["plugins", "--json"]) == 0
    out, err = capsys.readouterr()
    assert {plugin["id"] for plugin in json.loads(out)["plugins"]} == {"core", "loud"}
    assert err == "imported\nasked\n"


def test_a_text_that_the_terminal_cannot_show_is_escaped(alone, monkeypatch, tmp_path):
    alone.install("odd", "raise RuntimeError('caf\\xe9 \\ud800')\n")
    with (tmp_path / "out").open("w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["plugins", "odd"]) == 0
    assert r"RuntimeError: caf\xe9 \ud800" in (tmp_path / "out").read_text("ascii")


def test_the_version_needs_no_plugins(monkeypatch, capsys, fresh_registry):
    monkeypatch.setenv("AXCORE_DISABLE", "no-such-plugin")
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])


def test_a_list_of_entry_points_that_cannot_be_read_is_its_distributions_fault_alone(site, monkeypatch):
    site.install("good")
    site.install("bad")
    site.install("other")
    (site.folder / "ax_bad-0.1.dist-info" / "entry_points.txt").write_text("[axcore.plugins]\nbad thrown_ax_bad\n")
    (site.folder / "ax_other-0.1.dist-info" / "entry_points.txt").write_text("[console_scripts]\nno equals sign\n")
    plugins = registry().plugins
    assert plugins["good"].state is plugins["core"].state is plugins["rope"].state is State.LOADED
    assert plugins["ax-bad"].state is State.FAILED and str(plugins["ax-bad"]) == "ax-bad 0.1"
    assert "the entry_points.txt of ax-bad 0.1 cannot be read" in plugins["ax-bad"].reason
    assert "ax-other" not in plugins


def test_a_ctrl_c_while_plugins_load_is_no_fault_of_a_plugin(site):
    site.install("slow", "import signal\nsignal.raise_signal(signal.SIGINT)\n")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has none
    try:
        with pytest.raises(KeyboardInterrupt):
            site.registry()
    finally:
        signal.signal(signal.SIGINT, before)
