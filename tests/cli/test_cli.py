"""The `axcore` command: error messages, full disks, missing plugins and listings."""

import contextlib
import importlib.metadata
import os
import re
import resource
import shutil
import subprocess
import sys
import time

import pytest

from axcore.plugin import registry
from axcore.train import Checkpointer
from axcore.train.callbacks.writers import read_jsonl

pytestmark = pytest.mark.long


@pytest.fixture
def train(axcore, corpus, tmp_path):
    """Runs `axcore train tiny` on the corpus into `run`. Further flags override the corpus."""
    return lambda *flags: axcore("train", "tiny", "--set", f"input.source.folder={corpus}", *flags)


@pytest.fixture
def nothing_written(tmp_path):
    """Checks after the test that the working directory is empty."""
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def edit(monkeypatch, tiny_on_path):
    """Changes the recipe `tiny` for one test: `edit(lambda cfg: ...)`."""
    from axcore_tiny import recipes

    return lambda change: monkeypatch.setattr(recipes, "edit", change)


# Errors.


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["train", "quickstrat"], ["no recipe 'quickstrat'", "Did you mean 'quickstart'?"]),
        *[([command, "quickstrat"], ["Did you mean 'quickstart'?"]) for command in ("show", "tree", "aot")],
        (["diff", "tiny", "quickstrat"], ["Did you mean 'quickstart'?"]),
        (["golden", "chekc"], ["chekc", "check"]),
        (["train", "xyzzy"], ["no recipe 'xyzzy'", "Known: ", "quickstart, "]),
        (["train", ""], ["no recipe ''"]),
        (["train"], ["recipe"]),
        (["trian", "tiny"], ["there is no command 'trian'. Did you mean 'train'?"]),
        ([], ["COMMAND"]),
        (["plugins", "--nonsense"], ["--nonsense"]),
        (["train", "tiny", "--mintues", "3"], ["--mintues", "Did you mean '--minutes'?"]),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value[0], str) else None,
)
def test_case_a_wrong_name_fails_and_suggests_the_right_one(axcore, nothing_written, argv, expected):
    message = axcore(*argv).message
    assert all(part in message for part in expected), message


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("model.dmi=3", ["'model.dmi'", "Did you mean 'model.dim'?"]),
        ("num_kv_heads=3", ["'num_kv_heads'", "model.decoder.layers.attention.num_kv_heads"]),
        ("moddel=3", ["'moddel'", "Did you mean 'model'?"]),
        ("callbacks.metric.file=x", ["'callbacks.metric'"]),
        ("steps", ["--set requires path=value, not 'steps'"]),
        ("=3", ["--set requires path=value, not '=3'"]),
        ("", ["--set requires path=value, not ''"]),
        ("steps=many", ["steps must be int or None, not 'many'"]),
        ("steps=1.5", ["steps must be int or None, not '1.5'"]),
        ("steps=", ["steps must be int or None, not ''"]),
        ("steps={[]: 1}", ["steps must be int or None"]),
        ("steps=" + "(" * 200 + ")" * 200, ["steps must be int or None"]),
        ("model.dim=16.5", ["model.dim must be int, not '16.5'"]),
        ("model.dim=True", ["model.dim must be int, not 'True'"]),
        ("model.dim=none", ["model.dim must be int"]),
        ("model.decoder=3", ["model.decoder", "node"]),
        ("model.decoder.layers.ffn.activation=rellu", ["model.decoder.layers.ffn.activation"]),
        ("callbacks=none", ["callbacks"]),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_an_invalid_override_fails_and_names_the_path(train, nothing_written, assignment, expected):
    message = train("--set", assignment).message
    assert all(part in message for part in expected), message


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--minutes", "0"], "minutes must be above 0"),
        (["--minutes", "-1"], "minutes must be above 0"),
        (["--minutes", "abc"], "--minutes"),
        (["--minutes", "nan"], "minutes must be finite and above 0"),
        (["--minutes", "inf"], "minutes must be finite and above 0 and below"),
        (["--minutes", "9" * 400], "minutes"),
        (["--minutes", ""], "--minutes"),
        (["--set", "minutes=1"], "steps=30 and minutes=1"),
        (["--set", "steps=none"], "steps=None and minutes=None"),
        (["--set", "steps=0"], "steps must be at least 1"),
        (["--set", "steps=-5"], "steps must be at least 1"),
        (["--set", "steps=2147483647"], "steps must be at least 1 and below 2147483647"),
        (["--set", "steps=none", "--set", "minutes=1e999"], "minutes"),
        (["--seed", "-1"], "seed must be at least 0 and below 4294967296, not -1"),
        (["--seed", str(2**32)], "seed must be at least 0 and below 4294967296"),
        (["--seed", "9" * 30], "seed must be at least 0 and below 4294967296"),
        (["--seed", "x"], "--seed"),
        (["--set", "seed=-1"], "seed must be at least 0"),
        (["--set", "input.batch_size=0"], "batch_size must be at least 1"),
        (["--set", "input.batch_size=100000"], "batch_size=100000"),
        (["--set", "input.seq_len=-1"], "seq_len must be at least 1"),
        (["--set", "input.source.validation_percent=0"], "validation_percent"),
        (["--set", "model.decoder.num_layers=0"], "num_layers"),
        (["--set", "model.decoder.layers.attention.num_heads=3"], "decoder.layers.attention: input_dim=16"),
        (["--set", "model.decoder.layers.attention.num_heads=0"], "num_heads"),
        (["--set", "model.dim=0"], "dim"),
        (["--set", "checkpointer.keep=0"], "checkpointer.keep"),
        (["--set", "callbacks.saving.every_steps=-1"], "callbacks.saving.every_steps must be at least 1"),
        (["--set", "mesh.shape={'data': 7}"], "mesh.shape"),
        (["--set", "learner.clip_norm=-1"], "clip_norm"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_case_a_value_out_of_range_fails_before_anything_is_written(train, nothing_written, flags, expected):
    assert expected in train(*flags).message


def test_a_corpus_without_text_fails_and_names_the_folder(axcore, tmp_path, train):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"no text in folder='{empty}'" in train("--set", f"input.source.folder={empty}").message
    (empty / "binary.txt").write_bytes(b"\0\1")
    (empty / "nothing.txt").write_bytes(b"")
    assert "1 empty" in (message := train("--set", f"input.source.folder={empty}").message) and "1 not text" in message
    assert "does not exist" in train("--set", f"input.source.folder={tmp_path}/absent").message
    (tmp_path / "file").write_text("x")
    assert "is not a folder" in train("--set", f"input.source.folder={tmp_path}/file").message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_a_missing_required_value_is_named_by_its_path(axcore, nothing_written):
    assert "input.source.folder" in axcore("train", "tiny").message


@pytest.mark.parametrize(
    ("path", "take_away"),
    [
        ("input.seq_len", lambda cfg, none: cfg.set(input=cfg.input.set(seq_len=none))),
        ("model.dim", lambda cfg, none: cfg.set(model=cfg.model.set(dim=none))),
        (
            "model.decoder.num_layers",
            lambda cfg, none: cfg.set(model=cfg.model.set(decoder=cfg.model.decoder.set(num_layers=none))),
        ),
        ("model", lambda cfg, none: cfg.set(model=none)),
        ("input", lambda cfg, none: cfg.set(input=none)),
    ],
    ids=["input.seq_len", "model.dim", "model.decoder.num_layers", "model", "input"],
)
def test_a_recipe_with_a_required_value_fails_and_names_its_path(
    axcore, edit, nothing_written, corpus, path, take_away
):
    import axcore as ax

    with_corpus = lambda cfg: cfg.set(input=cfg.input.set(source=cfg.input.source.set(folder=str(corpus))))  # noqa: E731
    edit(lambda cfg: take_away(with_corpus(cfg), ax.REQUIRED))
    message = axcore("train", "tiny").message
    assert path in message and "REQUIRED" in message, message


def test_a_broken_recipe_is_named(axcore, edit, nothing_written):
    edit(lambda cfg: None)
    assert "'tiny'" in axcore("train", "tiny").message


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("file/run", "Not a directory"),
        ("file", "is a file"),
        ("/proc/run", "No such file"),
        ("/proc", "cannot write to the run folder /proc"),
        ("n" * 300, "File name too long"),
        ("", "out='' is not a path"),
        ("~nobody-here/run", "out='~nobody-here/run' starts with a home directory that does not exist"),
    ],
    ids=["below a file", "a file", "/proc/run", "/proc", "long", "empty", "home"],
)
def test_an_unwritable_output_folder_fails_with_the_reason(train, tmp_path, out, reason):
    (tmp_path / "file").write_text("mine")
    assert reason in train("--out", out).message
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "mine")]


BOUND_BY_MODES = """
import ctypes, os

if os.geteuid() == 0:
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, data) == 0
"""
"""Drops the capabilities of root, so that file modes apply. Root still owns its files, so it can import a checkout that
only its owner can read. (The numbers mean: version 3 of the call, this thread, no capabilities.)"""


@pytest.mark.skipif(
    os.geteuid() == 0 and sys.platform != "linux", reason="dropping the capabilities of root requires Linux"
)
@pytest.mark.parametrize("at", ["the run folder", "its parent", "the corpus"])
def test_case_missing_permissions_are_named(processes, corpus, tmp_path, at):
    texts, run = tmp_path / "texts", tmp_path / "parent" / "run"
    shutil.copytree(corpus, texts)
    run.mkdir(parents=True)
    (run / "config.txt").touch()
    locked = {"the run folder": run, "its parent": run.parent, "the corpus": texts}[at]
    locked.chmod(0o000)
    try:
        flags = ("--set", f"input.source.folder={texts}", "--out", run)
        job = processes.start("train", "tiny", *flags, cwd=tmp_path, prepare=BOUND_BY_MODES)
        message = job.wait().message
    finally:
        locked.chmod(0o755)
    assert str(texts if at == "the corpus" else run) in message
    assert list(run.iterdir()) == [run / "config.txt"]


# Full disks.


@contextlib.contextmanager
def limited_files(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB. Skips the test if it cannot be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("cannot mount a small file system here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder, leave):
    """Fills a file system except for `leave` bytes."""
    with (folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    size = (folder / "ballast").stat().st_size
    os.truncate(folder / "ballast", max(0, size - leave))


@pytest.fixture
def sabotaged(edit, monkeypatch):
    """Runs a function when step 25 is reported and the checkpoint of step 20 is on the disk."""
    from axcore_tiny import callbacks

    def when(action):
        def after_the_checkpoint(folder):
            while not (folder / "checkpoints" / "20").exists():
                time.sleep(0.01)
            action(folder)

        monkeypatch.setattr(callbacks, "sabotage", after_the_checkpoint)
        edit(lambda cfg: cfg.set(callbacks=cfg.callbacks | {"saboteur": callbacks.Saboteur.Config(at=25)}))

    return when


def restorable(folder):
    """The steps of the complete checkpoints."""
    with Checkpointer.Config().build(folder / "checkpoints") as checkpointer:
        return [step for step in checkpointer.steps() if checkpointer.meta(step)["seconds"] > 0]


@pytest.mark.parametrize("full", ["checkpoint", "metrics"])
def test_a_full_disk_ends_the_run_and_earlier_checkpoints_resume(train, sabotaged, small_disk, full):
    run = small_disk / "run"
    sabotaged(lambda folder: fill(small_disk, leave=40_000 if full == "checkpoint" else 0))
    message = train("--out", run).message
    assert "No space left on device" in message
    first = message.splitlines()[0]  # later failures follow on more lines
    assert ("checkpoint" in first) == (full == "checkpoint") and str(run) in message
    assert restorable(run) == [10, 20]
    assert not (run / "summary.json").exists()
    (small_disk / "ballast").unlink()
    sabotaged(lambda folder: None)
    done = train("--out", run, "--resume")
    assert done.code == 0, done.err
    steps = [line["step"] for line in read_jsonl(run / "metrics.jsonl") if "train/loss" in line]
    assert steps == list(range(1, 31)) and restorable(run) == [10, 20, 30]


@pytest.mark.parametrize("full", ["checkpoint", "metrics"])
def test_a_file_size_limit_ends_the_run_and_checkpoints_resume(train, sabotaged, tmp_path, full):
    run = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        limit = lambda folder: stack.enter_context(  # noqa: E731
            limited_files((folder / "metrics.jsonl").stat().st_size + (10_000 if full == "checkpoint" else 10))
        )
        sabotaged(limit)
        message = train("--out", run).message
    assert "File too large" in message
    first = message.splitlines()[0]  # later failures follow on more lines
    assert ("checkpoint" in first) == (full == "checkpoint") and str(run) in message
    assert restorable(run) == [10, 20]
    sabotaged(lambda folder: None)
    done = train("--out", run, "--resume")
    assert done.code == 0, done.err
    assert restorable(run) == [10, 20, 30]


def test_a_disk_that_is_full_from_the_start_is_named(train, small_disk):
    fill(small_disk, leave=0)
    assert "No space left on device" in train("--out", small_disk / "run").message
    assert not (small_disk / "run" / "config.txt").exists()


# Missing plugins.


def test_a_disabled_plugin_is_named_with_the_recipe_that_requires_it(axcore, monkeypatch, nothing_written):
    monkeypatch.setenv("AXCORE_DISABLE", "rope")
    message = axcore("train", "quickstart").message
    assert all(part in message for part in ("'quickstart'", "'rope'", "disabled", "AXCORE_DISABLE")), message
    assert "rope" in axcore("plugins").out and "disabled" in axcore("plugins").out


ABSENT = """
import importlib.metadata, sys

class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "axcore_rope":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden)
distributions = importlib.metadata.distributions
importlib.metadata.distributions = lambda **kwargs: (
    found for found in distributions(**kwargs) if found.name != "axcore-rope"
)

from axcore.cli import main

print(main(["plugins"]), main(["recipes"]))
heavy = {"jax", "flax", "numpy", "optax", "orbax", "grain", "axcore_recipes.quickstart"}
print("loaded:", sorted(heavy & set(sys.modules)))
try:
    main(["--help"])
except SystemExit as stop:
    print("help:", stop.code)
print("loaded:", sorted({"jax", "flax"} & set(sys.modules)), flush=True)
sys.exit(main(["train", "quickstart"]))
"""


def test_a_missing_plugin_is_named_with_the_install_command(tmp_path):
    """Also checks that no heavy package is imported before training. Runs in a new interpreter."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", ABSENT], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("axcore: ") and done.stderr.count("\n") == 1, done.stderr
    for part in ("recipe 'quickstart'", "feature 'rope'", "pip install axcore-rope"):
        assert part in done.stderr
    lines = done.stdout.splitlines()
    assert "0 0" in lines and "help: 0" in lines
    assert [line for line in lines if line.startswith("loaded:")] == ["loaded: []", "loaded: []"]
    assert "axcore-rope" not in done.stdout and "quickstart" in done.stdout
    assert list(tmp_path.iterdir()) == []


# Listings and help.


def test_plugins_are_listed_with_version_state_and_offers(axcore):
    done = axcore("plugins")
    assert (done.code, done.err) == (0, "")
    head, *rows = done.out.splitlines()
    assert head.split() == ["id", "distribution", "version", "state", "offers"]
    version = importlib.metadata.version("axcore-rope")
    rope = next(row for row in rows if row.startswith("rope "))
    offers = "feature alibi, feature learned-positions, feature rope"
    assert rope.split(maxsplit=4) == ["rope", "axcore-rope", version, "loaded", offers]
    assert "recipe quickstart" in next(row for row in rows if row.startswith("recipes "))
    starts = {line.index(word) for line, word in [(head, "state"), *((row, "loaded") for row in rows)]}
    assert len(starts) == 1  # columns are aligned
    assert [row.split()[0] for row in rows] == sorted(registry().plugins)


def test_recipes_are_listed_with_summaries(axcore):
    done = axcore("recipes")
    assert (done.code, done.err) == (0, "")
    head, *rows = done.out.splitlines()
    assert head.split() == ["recipe", "summary", "from"]
    quickstart = next(row for row in rows if row.startswith("quickstart "))
    assert quickstart.endswith("axcore-recipes") and len(quickstart.split()) > 4
    assert next(row for row in rows if row.startswith("tiny ")).endswith("axcore-tiny")


@pytest.mark.parametrize("command", ["plugins", "recipes", "--help"])
def test_a_closed_pipe_is_not_an_error(processes, command):
    done = processes.start(command, reader=False).wait()
    assert (done.code, done.err) == (0, "")


def test_every_command_has_help(axcore):
    done = axcore("--help")
    assert (done.code, done.err) == (0, "") and done.out.startswith("usage: axcore")
    commands = re.findall(r"^    (\w+) +\w", done.out, re.MULTILINE)
    assert {"train", "plugins", "recipes"} <= set(commands)
    for command in commands:
        done = axcore(command, "--help")
        assert (done.code, done.err) == (0, "") and done.out.startswith(f"usage: axcore {command}")
        assert "--help" in done.out and len(done.out.splitlines()) > 3
    done = axcore("train", "--help")
    assert all(flag in done.out for flag in ("--out", "--minutes", "--seed", "--resume", "--set PATH=VALUE"))


def test_the_version_is_that_of_the_distribution(axcore):
    assert axcore("--version").out.strip() == f"axcore {importlib.metadata.version('axcore')}"


def test_case_a_command_of_a_plugin_that_is_not_loaded_is_explained(axcore, fresh_registry, monkeypatch):
    monkeypatch.setenv("AXCORE_DISABLE", "hf")
    done = axcore("convert", "hf:DIR", "out")
    assert done.code == 2
    assert "there is no command 'convert'. Known: train, " in done.err and "\n  not loaded: hf (axcore-hf" in done.err


def test_disabling_an_unknown_name_fails(axcore, monkeypatch):
    monkeypatch.setenv("AXCORE_DISABLE", "roep")
    assert "'roep'" in (message := axcore("plugins").message) and "Did you mean 'rope'?" in message


# Commands of plugins.


@pytest.fixture
def plugin_with(monkeypatch, tmp_path, fresh_registry):
    """Installs a plugin for one test: `plugin_with("id", "its module's source")`."""
    sources = tmp_path.parent / f"{tmp_path.name}-plugins"

    def install(name, source):
        (sources / f"axcore_{name}-1.0.dist-info").mkdir(parents=True)
        (sources / f"axcore_{name}-1.0.dist-info" / "METADATA").write_text(f"Name: axcore-{name}\nVersion: 1.0\n")
        points = f"[axcore.plugins]\n{name} = axcore_{name}\n"
        (sources / f"axcore_{name}-1.0.dist-info" / "entry_points.txt").write_text(points)
        (sources / f"axcore_{name}.py").write_text("from axcore.plugin import *\n\n" + source)
        monkeypatch.syspath_prepend(str(sources))
        registry.cache_clear()

    yield install
    for name in [name for name in sys.modules if name.startswith(("axcore_greeter", "axcore_rival"))]:
        del sys.modules[name]


GREETER = """
@hookimpl
def axcore_commands():
    return [Command("{command}", "axcore_{name}:greet", "Greets; {summary}.")]

def greet(arguments):
    print("greetings from {name}", *arguments)
    return 5
"""


def test_a_plugin_command_gets_arguments_and_sets_the_exit_code(axcore, plugin_with):
    plugin_with("greeter", GREETER.format(command="greet", name="greeter", summary="100% friendly"))
    done = axcore("greet", "--help", "you")
    assert (done.code, done.out, done.err) == (5, "greetings from greeter --help you\n", "")
    assert "greet" in axcore("--help").out and "100% friendly" in axcore("--help").out


def test_a_plugin_cannot_replace_a_built_in_command(axcore, plugin_with):
    plugin_with("greeter", GREETER.format(command="plugins", name="greeter", summary="friendly"))
    done = axcore("plugins")
    assert done.code in (0, 2) and "Traceback" not in done.err
    assert "greetings" not in done.out
    assert axcore("--help").code == 0
    assert axcore("recipes").code == 0


def test_two_plugins_with_the_same_command_are_named(axcore, plugin_with):
    for name in ("greeter", "rival"):
        plugin_with(name, GREETER.format(command="greet", name=name, summary="friendly"))
    message = axcore("greet").message
    assert "greeter" in message and "rival" in message
    assert axcore("plugins").code == 0 and axcore("--help").code == 0


def test_a_plugin_that_fails_to_import_is_listed_with_the_reason(axcore, plugin_with, corpus):
    plugin_with("greeter", "raise RuntimeError('no good today')\n")
    done = axcore("plugins")
    row = next(line for line in done.out.splitlines() if line.startswith("greeter "))
    assert done.code == 0 and "failed" in row and "no good today" in row
    assert axcore("recipes").code == 0
