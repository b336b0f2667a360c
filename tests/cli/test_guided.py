"""Flags of `axcore generate` that say what the output must match, and the choice between installed plugins."""

import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from axcore.cli.model import chosen_offer
from axcore.module import abstract
from axcore.plugin import AdaptersOffer, GrammarCompilerOffer, PluginError, registry
from axcore.train import save_model
from axcore.train.data import ByteTokenizer


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """A model with weights, whose output is no text without a grammar."""
    params, state = abstract(tiny.model)[1:]
    filled = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.1, leaf.dtype), (params, state))
    return save_model(tmp_path_factory.mktemp("model") / "m", tiny.model, *filled, tokenizer=ByteTokenizer.Config())


@pytest.fixture
def run(axcore, folder):
    return lambda *flags, prompt="p:", tokens=24: axcore(
        "generate", folder, "--prompt", prompt, "--tokens", tokens, *flags
    )


@pytest.mark.long
def test_the_output_matches_the_regular_expression_the_schema_a_choice_or_the_rules(run, tmp_path):
    schema, lark, gbnf = (tmp_path / name for name in ("schema.json", "rules.lark", "rules.gbnf"))
    schema.write_text(json.dumps({"enum": [{"a": 12}]}))
    lark.write_text('start: "x" (/[0-9]/) "y"')
    gbnf.write_text('root ::= "x" [a-c] "y"')
    for flags, pattern in (
        (("--regex", "[0-9]{3}-[a-c]{2}"), "[0-9]{3}-[a-c]{2}"),
        (("--json-schema", schema, "--grammars", "llguidance:whitespace="), r'\{"a":12\}'),
        (("--choice", "yes", "--choice", "no"), "yes|no"),
        (("--grammar", lark), "x[0-9]y"),
        (("--grammar", gbnf, "--speculation", "ngram"), "x[a-c]y"),
    ):
        done = run(*flags)
        assert (done.code, done.err) == (0, "") and re.fullmatch(f"p:({pattern})\n", done.out), done


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--regex a --choice b", "--regex and --choice exclude each other. Give one of them"),
        (
            "--grammars llguidance",
            "--grammars llguidance has no effect without one of --regex, --json-schema, --choice",
        ),
        ("--regex a --grammars llguidence", "no installed plugin offers the grammar compiler 'llguidence'. Did you"),
        ("--regex a --cache none", "only with a KV cache, but --cache is none"),
        ("--choice=", "--choice: sampling.grammar: choice [''] must be a list of strings, at least one and none empty"),
        (
            "--regex a\udcff",
            "--regex: sampling.grammar: 'a\\udcff' has a surrogate, '\\udcff', which is not a character",
        ),
        ("--choice a --choice \ud800", '--choice: sampling.grammar: \'["a", "\\ud800"]\' has a surrogate'),
        ("--json-schema nowhere", "--json-schema nowhere: [Errno 2] No such file or directory"),
        ("--json-schema HERE/half", '--json-schema: sampling.grammar: \'onst": "\\ud800"}\' has a surrogate'),
        ("--json-schema HERE/bad", "--json-schema: sampling.grammar: the json_schema is not JSON"),
        ("--grammar HERE", "Give the path of a text file"),
    ],
)
def test_case_flags_that_do_not_fit_fail_before_the_model_is_loaded(axcore, tmp_path, flags, message):
    (tmp_path / "bad").write_text("{")
    (tmp_path / "half").write_text(json.dumps({"const": "\ud800"}))
    flags = flags.replace("HERE", str(tmp_path)).split(" ")
    assert message in axcore("generate", "no-such-model", "--prompt", "p", *flags).message


@pytest.mark.long
def test_an_invalid_pattern_fails(run):
    assert "sampling.grammar: regex: " in run("--regex", "(").message


@pytest.mark.parametrize(("kind", "package"), [(GrammarCompilerOffer, "axcore-guided"), (AdaptersOffer, "axcore-lora")])
def test_the_only_installed_plugin_is_the_default(monkeypatch, kind, package):
    held = []
    monkeypatch.setattr(type(registry()), "offers", lambda _, asked: [(None, each) for each in held if asked is kind])
    with pytest.raises(PluginError, match=f"^--flag: no installed plugin offers {kind.kind}. pip install {package}$"):
        chosen_offer(kind, None, "--flag", package)
    held[:] = [SimpleNamespace(name="b"), SimpleNamespace(name="a")]
    with pytest.raises(PluginError, match=r"^--flag: several are installed: a, b\. Choose one, as in --flag a$"):
        chosen_offer(kind, None, "--flag", package)
    monkeypatch.undo()
    (only,) = [offer.name for _, offer in registry().offers(kind)]
    assert chosen_offer(kind, None, "--flag", package) == chosen_offer(kind, only, "--flag", package)
