"""`axcore loc measure`: a correct feature is O(1), and faulty features are detected."""

import dataclasses
import json

import pytest

import axcore as ax
from axcore.nn import Linear
from axcore_loc import evidence, integrations, measure as measuring, proof, workspace
from axcore_loc.cli import main
from axcore_loc.feature import core_objects, find, package_sources, replaced
from axcore_loc.integrations import BY_USE
from axcore_loc.measure import measure
from axcore_loc.report import as_json, as_text


@pytest.mark.slow
def test_rope_is_constant_and_adds_no_lines_to_models(rope):
    found = as_json(rope)
    assert (found["order"], found["lines_in_models"], found["variants"]) == ("O(1)", 0, 4)
    assert found["lines"]["core"] == 0
    changed = {at: lines["recipe"] - found["mentioned_before"]["recipe"] for at, lines in rope.counted.lines.items()}
    assert changed == dict.fromkeys([(1, 1), (1, 2), (2, 1), (2, 2)], 1)  # the line that calls `use`
    assert found["options"] == {"theta": 500.0}


@pytest.mark.long
def test_mentions_in_installed_recipes_are_counted(rope):
    sources = package_sources("axcore_recipes").values()
    assert rope.mentioned["recipe"] == sum(source.count('ax.use("rope"') for source in sources) > 0


def test_rope_is_proven_for_every_variant(rope):
    assert rope.proof.holds
    assert (rope.proof.by_shapes, rope.proof.by_numbers) == (4, 1)
    assert [str(role) for role in rope.proof.roles] == ["TransformerLayer.attention (Attention)"]
    assert rope.proof.brought == 4


def test_controls_have_their_expected_orders(rope):
    orders = {each.integration.name: each.fit.order for each in rope.controls}
    assert orders == {
        "by hand in each model": "O(N)",
        "by hand in each attention": "O(M)",
        "by hand in each model, for each attention": "O(NM)",
    }
    assert all(each.same_recipes for each in rope.controls)
    assert all(each.full["models"] > 0 for each in rope.controls)


def test_text_report(rope):
    text = as_text(rope)
    assert text.startswith("rope (axcore-rope 0.1.0) in 2 models x 2 attentions: O(1)")
    assert "by hand in each model, for each attention: O(NM)" in text


@pytest.fixture
def proven(monkeypatch, wrong):
    """The proof of a feature of the plugin `wrong`, by shapes alone, over two attentions."""
    monkeypatch.setattr(evidence, "some", lambda pairs: ())

    def prove(name, models=("small",)):
        call = integrations.use_call(name, {})
        return evidence.prove(find(name), models, ["mha", "gqa"], call, lambda line: None)[0]

    return prove


def test_correct_feature_with_parameters(proven):
    found = proven("right")
    assert found.holds
    assert (found.by_shapes, found.new_parameters) == (2, 2)


def test_feature_that_skips_a_variant_is_detected(proven, rope):
    found = proven("some")
    assert found.faults.keys() == {"small-gqa"}
    assert "the feature is not at model.decoder.layers.attention" in found.faults["small-gqa"]
    failed = dataclasses.replace(rope, proof=found)
    assert as_json(failed)["order"] is None
    assert "NOT PROVEN" in as_text(failed)
    assert "small-gqa: the feature is not at" in as_text(failed)


def test_unused_parameter_is_detected(proven):
    faults = proven("unused").faults
    assert faults.keys() == {"small-mha", "small-gqa"}
    assert "the loss does not depend on decoder.layers.attention.output.scale" in faults["small-mha"]


def test_existing_mentions_of_the_plugin_are_counted():
    models, slots = workspace.names("models"), workspace.names("attentions")
    known = measuring._count(BY_USE, models, slots, "ax.use('x')", frozenset({"FeedForward"}), {"core": 4})
    assert known.fit.order == "O(N)"  # every model has lines with a FeedForward
    assert known.lines[1, 1] == {"core": 4, "models": 2, "recipe": 1}


def test_variants_that_a_feature_rejects_are_excluded(proven, monkeypatch):
    found = proven("picky")
    assert found.refused.keys() == {"gqa"}
    assert "only multi-head attention" in found.refused["gqa"]
    assert (found.by_shapes, found.faults) == (1, {})
    monkeypatch.setattr(
        workspace, "names", lambda kind, count: ["mha", "gqa"] if kind == "attentions" else ["small", "tied"]
    )
    with pytest.raises(ax.ConfigError, match=r"attentions, not 2 and 1\n.*only multi-head attention"):
        measure("picky", 2, 2, lambda line: None)


def test_variants_rejected_while_building_are_excluded(proven):
    found = proven("late")
    assert found.refused.keys() == {"gqa"}
    assert found.refused["gqa"].endswith("attention.output: only 4 key heads")
    assert (found.by_shapes, found.new_parameters, found.faults) == (1, 1, {})


def test_unexpected_errors_are_faults(proven):
    found = proven("broken")
    assert found.refused == {}
    assert found.faults.keys() == {"small-mha", "small-gqa"}
    assert "RuntimeError: broken" in found.faults["small-gqa"][0]


def test_variants_rejected_with_some_partners_are_kept():
    pairs = [("small", "mha"), ("small", "gqa"), ("wide", "mha"), ("wide", "gqa")]
    refused = dict.fromkeys([("small", "gqa"), ("wide", "gqa"), ("wide", "mha")], "no")
    assert evidence.dropped(pairs, refused) == {"wide": "no", "gqa": "no"}
    assert evidence.dropped(pairs, {("small", "gqa"): "no"}) == {}


def test_plugin_that_patches_the_core_is_detected(wrong, monkeypatch):
    monkeypatch.setattr(Linear, "__call__", Linear.__call__)  # restored after the test
    before = core_objects()
    with workspace.installed(workspace.sources(["small"], ["mha"])):
        cfg = ax.recipe("small-mha")
    ax.use("right")(cfg)
    assert replaced(before, core_objects()) == []
    ax.use("patching")(cfg)
    assert replaced(before, core_objects()) == ["axcore.nn.linear.Linear.__call__"]


@pytest.mark.long
def test_numbers_detect_an_unchanged_loss(wrong):
    cut = proof.Shapes(("decoder.layers.attention.query.weight", "head.weight"), ())
    with workspace.installed(workspace.sources(["small"], ["mha"])):
        cfg = ax.recipe("small-mha")
    same = proof.by_numbers(cfg, cfg, cut, changes_model=True)
    assert same.faults == ("the loss is the same without the feature",)


def test_variants_have_different_configs():
    sources = workspace.sources(workspace.names("models"), workspace.names("attentions"))
    with workspace.installed(sources):
        pairs = workspace.recipe_names(sources)
        texts = {ax.recipe("-".join(pair)).text() for pair in pairs}
    assert len(texts) == len(pairs) >= 200


def test_simplest_variant_comes_first_and_counts_are_checked():
    assert (workspace.names("models")[0], workspace.names("attentions")[0]) == ("small", "mha")
    with pytest.raises(ax.ConfigError, match=r"the number of models must be from 1 to 24, not 25"):
        workspace.names("models", 25)


def test_features_of_the_core_and_unknown_features_are_rejected(capsys):
    with pytest.raises(ax.ConfigError, match="'adamw' is a feature of the core"):
        measure("adamw")
    with pytest.raises(ax.ConfigError, match="requires at least two models and two attentions, not 1 and 12"):
        measure("rope", 1)
    with pytest.raises(ax.AxcoreError, match="no installed plugin offers the feature"):
        measure("no-such-feature")
    with pytest.raises(ax.AxcoreError, match=r"rope has no option 'thetta'. Did you mean 'theta'\?"):
        main(["measure", "rope:thetta=3"])


def test_json_report_is_serializable(rope):
    assert json.loads(json.dumps(as_json(rope)))["fit"]["constant"] >= 1
