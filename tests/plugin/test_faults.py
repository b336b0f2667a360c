"""Errors of plugin code name the plugin, and its side effects during discovery do not affect the program."""

import functools
import json
import signal
import sys

import pytest

from axcore.cli import main
from axcore.config import AxcoreError, Config, ConfigError
from axcore.plugin import PluginError, attributed, recipe, registry, target, use, use_text

CODE = """
import axcore as ax

def fails(cfg=None, amount=1):
    raise KeyError("deep")

def leaves(cfg=None):
    raise SystemExit(3)

def takes_nothing():
    pass

def annotated(cfg, amount: "Nowhere" = 1):
    return cfg

def fails_in_map(cfg):
    return ax.select(cfg, "").map(lambda path, node: {}["deep"])

def typo(cfg):
    return cfg.set(name=cfg.nmae)

def typo_in_map(cfg):
    return ax.select(cfg, "").map(lambda path, node: node.set(name=node.nmae))

def options(cfg, name="", feature="", kind=""):
    return cfg.set(name=name + feature + kind)

def text(arguments):
    return "0"

def argparse_like(arguments):
    raise SystemExit(7)
"""
NAMES = (
    *("fails_in_map", "typo", "typo_in_map"),
    *("fails", "leaves", "takes_nothing", "annotated", "options", "text", "argparse_like"),
)


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
    ("name", "told"),
    [
        ("fails_in_map", r"failed at .*thrown_faulty\.py:17: KeyError: 'deep'"),
        (
            "typo",
            r"failed at .*thrown_faulty\.py:20: AttributeError: .*Node has no field 'nmae'. Did you mean 'name'\?",
        ),
        ("typo_in_map", r"at the root: .*Node has no field 'nmae'. Did you mean 'name'\? \(.*thrown_faulty\.py:23\)"),
    ],
)
def test_case_an_error_in_an_edit_of_a_plugin_names_file_and_line(code, name, told):
    with pytest.raises((PluginError, ConfigError), match=rf"feature '{name}' \(ax-code 0\.1\):? {told}"):
        use(name)(Node())


def test_case_an_error_of_a_plugin_that_a_library_calls_names_the_line_of_the_plugin():
    def fails():
        functools.reduce(lambda a, b: a.modle, [1, 2])

    library, core = {"__name__": "optax.chain"}, {"__name__": "axcore.train", "attributed": attributed}
    exec("def chain(fn):\n    fn()\n", library)
    exec("def update(chain, fn):\n    with attributed('optimizer'):\n        chain(fn)\n", core)
    with pytest.raises(PluginError, match=r"^optimizer failed at .*test_faults\.py:\d+: AttributeError: "):
        core["update"](library["chain"], fails)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: use("fails")(Node()), r"feature 'fails' \(ax-code 0\.1\) failed at .*thrown_faulty\.py:5: KeyError: "),
        (lambda: use("leaves")(Node()), r"feature 'leaves' \(ax-code 0\.1\) failed at .*: SystemExit: 3"),
        (lambda: use("takes_nothing")(Node()), r"feature 'takes_nothing' \(ax-code 0\.1\) failed: TypeError"),
        (lambda: use_text("annotated:amount=2"), r"feature 'annotated' \(ax-code 0\.1\): its options .*'Nowhere'"),
        (lambda: recipe("fails"), r"recipe 'fails' \(ax-code 0\.1\) failed at .*: KeyError: 'deep'"),
        (lambda: recipe("leaves"), r"recipe 'leaves' \(ax-code 0\.1\) failed at .*: SystemExit: 3"),
        (lambda: target("cpu-8")(Node()), r"target 'cpu-8', rule 'cpu-\*' \(ax-code 0\.1\) failed at .*: KeyError"),
        (
            lambda: target("gpu-h100-8")(Node()),
            r"mesh rule 's' of ax-code 0\.1 could not be loaded from .*: SystemExit: 4",
        ),
    ],
)
def test_case_errors_name_the_plugin_the_offer_and_the_cause(code, call, told):
    with pytest.raises(PluginError, match=told) as error:
        call()
    assert error.value.__cause__ is not None


def test_ctrl_c_and_axcore_errors_propagate_unchanged():
    for passing in (KeyboardInterrupt(), AxcoreError("complete")):
        with pytest.raises(type(passing)) as error, attributed("it"):
            raise passing
        assert error.value is passing


def test_errors_name_the_line_of_the_plugin_not_of_a_library():
    with (
        pytest.raises(PluginError, match=r"^callback stop failed at .*test_faults\.py:\d+: JSONDecodeError: ") as error,
        attributed("callback stop"),
    ):
        json.loads("{")
    assert isinstance(error.value.__cause__, json.JSONDecodeError)


def test_failing_commands_are_named_and_exit_codes_are_checked(code, capsys):
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
        ("options:name=a,name=b", "NAME:KEY=VALUE,... with each key once"),
        ("options:name", "NAME:KEY=VALUE,... with each key once"),
    ],
)
def test_options_given_twice_or_without_a_value_raise(code, text, told):
    with pytest.raises(ConfigError) as error:
        use_text(text)
    assert told in str(error.value)


def test_output_of_plugins_during_discovery_goes_to_stderr(alone, capsys):
    alone.install("loud", "print('imported')\n@hookimpl\ndef axcore_features():\n    print('asked')\n    return []\n")
    assert main(["plugins", "--json"]) == 0
    out, err = capsys.readouterr()
    assert {plugin["id"] for plugin in json.loads(out)["plugins"]} == {"core", "loud"}
    assert err == "imported\nasked\n"


def test_a_plugin_may_keep_the_stream_that_it_sees_at_import(alone, capsys):
    alone.install("keeps", "import sys\nKEPT = sys.stderr\n")
    registry()
    sys.modules["thrown_ax_keeps"].KEPT.write("x" * 1000)
    assert capsys.readouterr().err == "x" * 1000


def test_text_that_stdout_cannot_encode_is_escaped(alone, monkeypatch, tmp_path):
    alone.install("odd", "raise RuntimeError('caf\\xe9 \\ud800')\n")
    with (tmp_path / "out").open("w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["plugins", "odd"]) == 0
    assert r"RuntimeError: caf\xe9 \ud800" in (tmp_path / "out").read_text("ascii")


def test_version_works_without_plugin_discovery(monkeypatch, capsys, fresh_registry):
    monkeypatch.setenv("AXCORE_DISABLE", "no-such-plugin")
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])


def test_ctrl_c_during_discovery_propagates(site):
    site.install("slow", "import signal\nsignal.raise_signal(signal.SIGINT)\n")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            site.registry()
    finally:
        signal.signal(signal.SIGINT, before)
