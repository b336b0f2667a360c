"""The recipe `quickstart`: its components, and the files of a run (slow)."""

import json
import math

import jax
import pytest

import axcore as ax
from axcore.cli import main
from axcore.module import abstract
from axcore.nn import Attention, TransformerLayer
from axcore.train import AdamW
from axcore.train.callbacks.writers import read_jsonl
from axcore_recipes.short_conv import ConvTransformerLayer


@pytest.fixture(scope="module")
def quickstart():
    return ax.recipe("quickstart")


def test_recipe_is_deterministic(quickstart):
    assert ax.recipe("quickstart").text() == quickstart.text()
    assert quickstart.build().config == quickstart


def test_duration_is_the_one_in_the_readme(quickstart):
    assert quickstart.steps is None and 3 <= quickstart.minutes < 4  # the command takes under four minutes


def test_every_layer_has_a_short_convolution(quickstart):
    found = ax.select(quickstart.model, TransformerLayer)
    assert {type(node) for _, node in found} == {ConvTransformerLayer.Config}


def test_muon_updates_layer_matrices_and_adamw_the_rest(quickstart):
    assert type(quickstart.learner.optimizer.others) is AdamW.Config
    state = quickstart.build().program().state.optimizer
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    names = ("attention", "query"), ("attention", "key"), ("attention", "value"), ("attention", "projection")
    moved = [path for path in paths if ".trace" in path]
    assert len(moved) == 6
    for block, name in (*names, ("ffn", "up"), ("ffn", "down")):
        assert sum(f"['{block}']['{name}']" in path for path in moved) == 1


def test_rope_is_in_every_attention(quickstart):
    found = [node for _, node in ax.select(quickstart.model, Attention)]
    assert found
    assert {type(node.position).__module__ for node in found} == {"axcore_rope.rotary"}


def test_model_has_the_documented_size(quickstart):
    fn, params, state = abstract(quickstart.model)
    sizes = [math.prod(leaf.shape) for leaf in _leaves(params)]
    assert 0.5e6 < sum(sizes) < 0.55e6
    assert not state
    layers = quickstart.model.decoder.num_layers
    stacked = [leaf for leaf, axes in zip(_leaves(params), _leaves(fn.axes), strict=True) if axes[0] == "layer"]
    assert stacked and {leaf.shape[0] for leaf in stacked} == {layers}


def test_vocabulary_size_equals_the_tokenizer(quickstart):
    assert quickstart.model.vocab_size == quickstart.input.tokenizer.build().vocab_size


def test_config_contains_no_absolute_path(quickstart, tmp_path):
    assert "/" not in quickstart.text().replace("**/", "")


def _leaves(tree):
    for value in tree.values():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield value


@pytest.mark.slow
def test_a_short_run_writes_its_files(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "quickstart", "--set", "steps=40", "--set", "minutes=none", "--out", str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    assert {"loss.png", "sample.txt", "summary.json", "config.txt", "metrics.jsonl", "checkpoints"} <= names
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "sample.txt").read_text().startswith("def read_file(path):\n")
    assert len((out / "sample.txt").read_text()) > 200
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 40 and summary["plugins"].keys() == {"muon", "recipes", "rope"}
    assert 1 < summary["lzma_bits_per_byte"] < summary["zlib_bits_per_byte"] < 3
    assert summary["zlib_bits_per_byte"] < summary["validation/bits_per_byte"] < 4.5
    config = (out / "config.txt").read_text()
    assert "steps: 40\n" in config and "axcore_rope.rotary.Rotary" in config
    steps = [line["step"] for line in read_jsonl(out / "metrics.jsonl") if "train/loss" in line]
    assert steps == list(range(1, 41))
    shown = capsys.readouterr().out
    assert "validation/bits_per_byte" in shown and str(out) in shown
