"""Each flag of each `axcore` command changes what the command does, or is refused."""

import argparse
import contextlib
import importlib
import json
import pathlib
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

import axcore as ax
import axcore_loc.report
import axcore_serve.app
import axcore_serve.server
import axcore_serve.templates
from axcore import aot, infer, train
from axcore.config import Config
from axcore.doctor.findings import Finding
from axcore.infer import load_test
from axcore.module import Layer, functional
from axcore.plugin import Command, registry, resolve
from axcore.train import Trainer, save_model
from axcore.train.data import ByteTokenizer
from axcore_hf import exporting

cli = importlib.import_module("axcore.cli")
RECORDED = pathlib.Path(__file__).parents[2] / "plugins/axcore-hf/tests/parity/recorded/llama"
TOKENIZER = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {f"w{n}": n for n in range(64)}, "unk_token": "w0"},
}
NOTHING = object()
pytestmark = pytest.mark.long

COMMANDS = {
    "adapter": ["adapter", "{here}/adapted", "new"],
    "aot": ["aot", "tiny"],
    "bench serve": ["bench", "serve", "tiny"],
    "convert": ["convert", "hf:{here}/hf", "new"],
    "diff": ["diff", "tiny", "tiny"],
    "doctor": ["doctor"],
    "explain": ["explain", "tiny"],
    "export": ["export", "{here}/model", "new"],
    "generate": ["generate", "tiny", "--use", "run-weights:folder={here}/weights", "--prompt", "a"],
    "golden": ["golden", "check"],
    "launch": ["launch", "--processes", "2", "--", "train", "tiny"],
    "loc check": ["loc", "check", "--base", "HEAD"],
    "loc measure": ["loc", "measure", "rope"],
    "loc peers": ["loc", "peers"],
    "merge": ["merge", "{here}/adapted", "new"],
    "new-plugin": ["new-plugin", "fresh-gate", "--kind", "layer"],
    "plan": ["plan", "tiny", "--target", "cpu-8"],
    "plugins": ["plugins"],
    "quantize": [
        *("quantize", "{here}/weights", "new", "--use", "int8:activation_scales=static"),
        *("--text", "{here}/tokenizer.json", "--seq-len", "64"),
    ],
    "recipes": ["recipes"],
    "rules": ["rules", "tiny", "--target", "cpu-8"],
    "serve": ["serve", "tiny", "--use", "run-weights:folder={here}/weights"],
    "show": ["show", "tiny"],
    "train": ["train", "tiny", "--set", "input.source.folder={here}"],
    "tree": ["tree", "tiny"],
    "tune": ["tune", "tiny", "--out", "tuning.json"],
}
"""Arguments with which each command succeeds."""

ENGINE = {
    "burst-tokens": "1024",
    "cache": "contiguous:max_len=9",
    "max-len": "64",
    "max-rows": "3",
    "speculation": "ngram",
    "step-tokens": "64",
}
EDITS = {"--use": "alibi", "--set": "seed=5", "--target": "gpu-h100-8"}
VALUES = {
    **{
        f"{name} {flag}": value
        for name in ("aot", "diff", "explain", "show", "train", "tune")
        for flag, value in EDITS.items()
    },
    "adapter --base": "{here}/weights",
    "adapter --peft": None,
    "adapter --step": "7",
    "aot --executable": "program",
    "aot --html": "page.html",
    "aot --json": "report.json",
    "aot --program": "decode",
    "bench serve --burst-tokens": "1024",
    "bench serve --cache": "contiguous:max_len=9",
    "bench serve --concurrency": "2",
    "bench serve --dtype": "bfloat16",
    "bench serve --input": "3",
    "bench serve --mesh": "tensor=1",
    "bench serve --output": "5",
    "bench serve --requests": "2",
    "bench serve --set": "model.softcap=3",
    "bench serve --speculation": "ngram",
    "bench serve --step-tokens": "32",
    "bench serve --use": "alibi",
    "convert --dtype": "bfloat16",
    "convert --tokenizer": "{here}/tokenizer.json",
    "doctor --json": None,
    **{f"{name} --{flag}": value for name in ("explain", "tune") for flag, value in ENGINE.items()},
    "explain --json": None,
    "export --config": "{here}/same.json",
    "export --dtype": "bfloat16",
    "export --force": None,
    "export --shard-gib": "1",
    "export --step": "7",
    "export --tokenizer": "{here}/tokenizer.json",
    "generate --adapter": "sql={here}/adapted",
    "generate --adapters": "lora:max_adapters=2",
    "generate --cache": "none",
    "generate --choice": "yes",
    "generate --dtype": "bfloat16",
    "generate --grammar": "{here}/rules.lark",
    "generate --grammars": "llguidance:whitespace=",
    "generate --json-schema": "{here}/other.json",
    "generate --mesh": "tensor=1",
    "generate --prompt": "b",
    "generate --regex": "[0-9]",
    "generate --seed": "1",
    "generate --set": "model.softcap=3",
    "generate --speculation": "ngram",
    "generate --temperature": "0.5",
    "generate --tokens": "3",
    "generate --use": "alibi",
    "golden --folder": "elsewhere",
    "launch --devices-per-process": "3",
    "launch --processes": "3",
    "launch --timeout": "5",
    "loc check --base": "HEAD~1",
    "loc check --budget": "3",
    "loc check --json": None,
    "loc measure --json": None,
    "loc measure --models": "1",
    "loc measure --slots": "1",
    "loc peers --cache": "elsewhere",
    "loc peers --json": None,
    "loc peers --source": "name@1=folder",
    "loc peers --write": "written",
    "merge --step": "7",
    "new-plugin --kind": "command",
    "new-plugin --out": "elsewhere",
    "plan --compile": "5",
    "plan --global-batch": "24",
    "plan --set": "seed=5",
    "plan --target": "cpu-4",
    "plan --use": "alibi",
    "plugins --json": None,
    "plugins --write-allowlist": "allowed",
    "quantize --seq-len": "32",
    "quantize --step": "7",
    "quantize --text": "{here}/other.json",
    "quantize --tokens": "128",
    "quantize --use": "int8:activation_scales=static,percentile=90",
    "rules --set": "input.batch_size=16",
    "rules --target": "cpu-4",
    "rules --use": "tensor:size=2",
    "serve --adapter": "sql={here}/adapted",
    "serve --adapters": "lora:max_adapters=2",
    "serve --api-keys": "{here}/tokenizer.json",
    "serve --cache": "contiguous:value_dim=4",
    "serve --chat-template": "{here}/tokenizer.json",
    "serve --drain-timeout": "3",
    "serve --dtype": "bfloat16",
    "serve --embeddings": "last",
    "serve --grammars": "llguidance:whitespace=",
    "serve --host": "0.0.0.0",
    "serve --max-body-mib": "3",
    "serve --max-len": "64",
    "serve --max-queue": "3",
    "serve --max-rows": "3",
    "serve --mesh": "tensor=1",
    "serve --name": "other",
    "serve --no-warm-up": None,
    "serve --port": "3",
    "serve --prefix-states": "4",
    "serve --prompt-logprobs": None,
    "serve --set": "model.softcap=3",
    "serve --speculation": "ngram",
    "serve --burst-tokens": "4096",
    "serve --step-tokens": "128",
    "serve --timeout": "3",
    "serve --use": "alibi",
    "show --history": "model",
    "show --json": None,
    "train --minutes": "2",
    "train --out": "elsewhere",
    "train --resume": None,
    "train --seed": "5",
    "train --steps": "7",
    "tree --html": None,
    "tree --set": "model.dim=32",
    "tree --use": "alibi",
    "tune --out": "elsewhere",
}
"""A value for each flag, which differs from the one in COMMANDS; None: a flag without a value."""
WITH = {
    **{f"{name} --{flag}": ["--max-len", "64"] for name in ("explain", "tune") for flag in ENGINE if flag != "max-len"},
    "export --force": ["--config", "{here}/other.json"],
    "generate --adapters": ["--adapter", "sql={here}/adapted"],
    "generate --grammars": ["--regex", "[0-9]"],
    "generate --seed": ["--temperature", "1"],
}
"""Further arguments that a flag requires in order to have an effect."""


class Caught(Exception):
    """Carries the parser of a command."""


def parsers(monkeypatch):
    """The parser of each command, of the core and of plugins."""

    def parse_args(parser, arguments):
        raise Caught(parser)

    found = dict(cli._parser()[1].choices)
    for plugin, offer in registry().offers(Command):
        with monkeypatch.context() as patch, pytest.raises(Caught) as caught:
            patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
            resolve(plugin, offer)([])
        found[offer.name] = caught.value.args[0]
    return found


def flags(name, parser):
    """(command, flag) of each optional argument of a parser and of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below, inner in action.choices.items():
                yield from flags(f"{name} {below}", inner)
        elif action.option_strings and not isinstance(action, argparse._HelpAction):
            yield name, action.option_strings[-1]


def summary(value):
    """The contents of a recorded argument, in a form that can be compared."""
    if isinstance(value, Layer):
        return value.config.text(), [str(each.dtype) for each in jax.tree.leaves(nnx.state(value))]
    if isinstance(value, Config):
        return value.text()
    if isinstance(value, dict):
        return {name: summary(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [summary(part) for part in value]
    if isinstance(value, jax.Array | np.ndarray):
        return str(value.dtype), repr(value)
    if isinstance(getattr(value, "config", None), Config):
        return value.config.text()
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))  # objects that differ in their address only are the same


@pytest.fixture
def observe(axcore, tiny, corpus, tmp_path, monkeypatch):
    """Runs a command whose expensive end is replaced by a record of its arguments: `observe(argv)` returns everything
    that it did."""
    calls = []
    shown = SimpleNamespace(problems=(), sound=True, passes=True, left_out=(), fits=True, best=True)
    shown.program = shown.target = ""
    shown.kernels, shown.order = {}, ()
    shown.to_json, shown.as_json, shown.as_text = (lambda: "{}"), (lambda: {}), (lambda: "text")
    shown.file = lambda: shown
    shown.write = lambda folder: calls.append(str(folder))

    def replace(where, name, result):
        monkeypatch.setattr(where, name, lambda *args, **kwargs: calls.append(summary([args, kwargs])) or result)

    for name, model in (("weights", tiny.model), ("adapted", ax.use("lora")(tiny).model)):
        _, params, state = functional(model.build(rngs=ax.Rngs(0)))
        save_model(tmp_path / name, model, params, state, tokenizer=ByteTokenizer.Config())
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    hf = shutil.copytree(RECORDED, tmp_path / "hf", ignore=shutil.ignore_patterns("gradients", "*.npz"))
    assert axcore("convert", f"hf:{hf}", tmp_path / "model").code == 0
    (tmp_path / "rules.lark").write_text('start: "a"')
    raw = json.loads((hf / "config.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps(raw | {"rms_norm_eps": 0.5}))
    (tmp_path / "same.json").write_text(json.dumps(raw | {"initializer_range": 0.5}))
    replace(Trainer, "run", {})
    replace(cli.launch, "launch", 0)
    replace(aot, "compile_program", shown)
    replace(aot, "report_page", "page")
    replace(importlib.import_module("axcore.aot.plan"), "plan", shown)
    replace(aot, "explain", shown)
    replace(importlib.import_module("axcore.aot.tune"), "tune", shown)

    def generator(*args, **given):
        calls.append(summary([args, given]))
        return []

    generator.load_adapter = None
    replace(generator, "load_adapter", None)
    replace(infer, "Generator", generator)
    engine = SimpleNamespace(
        warm_up=None, load_adapter=None, stats=SimpleNamespace(compiled=0, draft_tokens=0, accepted_tokens=0)
    )
    replace(engine, "warm_up", None)
    replace(engine, "load_adapter", None)
    replace(infer.Engine.Config, "build", contextlib.nullcontext(engine))
    listener = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 8000))
    replace(axcore_serve.server, "listening", contextlib.nullcontext(listener))
    replace(axcore_serve.templates, "ChatTemplate", None)
    replace(axcore_serve.app, "Service", None)
    replace(axcore_serve.server, "DrainingServer", SimpleNamespace(run=lambda sockets: None))
    replace(load_test, "measure", load_test.Figures(*[0.0] * 7))
    replace(train, "save_model", None)
    replace(exporting, "write", None)
    for name in ("measure.measure", "check.check", "peers.run"):
        replace(importlib.import_module(f"axcore_loc.{name.partition('.')[0]}"), name.partition(".")[2], shown)
    monkeypatch.setattr(axcore_loc.report, "as_json", lambda _: {})
    monkeypatch.setattr(axcore_loc.report, "as_text", lambda _: "text")
    monkeypatch.setattr(cli.doctor, "examine", lambda: [Finding("python", "ok", "fine")])

    def run(argv):
        calls.clear()
        before = set(tmp_path.rglob("*"))
        done = axcore(*(part.replace("{here}", str(tmp_path)) for part in argv))
        written = sorted(set(tmp_path.rglob("*")) - before, reverse=True)
        files = {str(each.relative_to(tmp_path)) for each in written}
        for each in written:
            each.rmdir() if each.is_dir() else each.unlink()
        return done.code, done.out, done.err, list(calls), files

    return run


def ignored(parsers, observe):
    """The flags that VALUES lacks, and those that neither change what the command does nor are refused."""
    usual = {}
    for name, parser in parsers.items():
        for command, flag in flags(name, parser):
            if (value := VALUES.get(f"{command} {flag}", NOTHING)) is NOTHING:
                yield f"{command} {flag} has no value in VALUES"
                continue
            base = [*COMMANDS[command], *WITH.get(f"{command} {flag}", ())]
            if tuple(base) not in usual:
                usual[tuple(base)] = observe(base)
            start = base[: base.index(flag) if flag in base else base.index("--") if "--" in base else len(base)]
            rest = base[len(start) + 2 * (flag in base) :]
            given = observe([*start, flag, *([] if value is None else [value]), *rest])
            if given == usual[tuple(base)] or "usage: " in given[2]:
                yield f"{command} {flag} has no effect: {given}"


def test_case_every_flag_of_every_command_has_an_effect(observe, monkeypatch):
    found = list(ignored(parsers(monkeypatch), observe))
    assert not found, "\n".join(found)


def test_case_a_flag_that_nobody_reads_is_found(observe, monkeypatch):
    original = cli.listing.add

    def add(commands):
        original(commands)
        commands.choices["recipes"].add_argument("--color")

    monkeypatch.setattr(cli.listing, "add", add)
    recipes = {"recipes": cli._parser()[1].choices["recipes"]}
    assert list(ignored(recipes, observe)) == ["recipes --color has no value in VALUES"]
    monkeypatch.setitem(VALUES, "recipes --color", "red")
    (found,) = ignored(recipes, observe)
    assert found.startswith("recipes --color has no effect")
