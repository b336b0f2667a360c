"""`axcore show`, `diff`, `tree` and `golden`."""

import json
import re

import jax
import pytest

import axcore as ax
from axcore.aot import tree
from axcore.config import from_json, text
from axcore.module import abstract
from axcore.train.checkpoint.model_folder import write_config

ATTENTION = "model.decoder.layers.attention"


@pytest.fixture
def edit(monkeypatch, tiny_on_path):
    """Changes the recipe `tiny` for one test: `edit(lambda cfg: ...)`."""
    from axcore_tiny import recipes

    return lambda change: monkeypatch.setattr(recipes, "edit", change)


def lines(done):
    assert (done.code, done.err) == (0, ""), done
    return done.out.splitlines()


def test_show_prints_the_text_form_with_edits_applied(axcore):
    assert axcore("show", "tiny").out == text(ax.recipe("tiny"))
    shown = lines(axcore("show", "tiny", "--use", "rope:theta=3e4", "--set", "steps=7"))
    assert f"{ATTENTION}.position.theta: 30000.0" in shown and "steps: 7" in shown


def test_show_and_tree_read_a_run_folder(axcore, tiny, tmp_path):
    write_config(tmp_path, tiny)
    assert axcore("show", str(tmp_path)).out == text(tiny)
    assert from_json(axcore("show", str(tmp_path), "--json").out) == tiny
    assert "steps: 7" in lines(axcore("show", str(tmp_path), "--set", "steps=7"))
    assert axcore("tree", str(tmp_path)).out == f"{tree(tiny)}\n"
    assert f"train requires a recipe, and {tmp_path} is a folder" in axcore("train", str(tmp_path)).message
    assert "is not a model folder" in axcore("show", str(tmp_path / "nowhere")).message


def test_show_json_can_be_read_back(axcore):
    done = axcore("show", "tiny", "--json", "--set", "steps=7")
    assert from_json(done.out) == ax.override(ax.recipe("tiny"), ["steps=7"])


def test_show_history_names_recipe_feature_and_override(axcore):
    flags = ("--use", "rope", "--set", f"{ATTENTION}.position.theta=5")
    shown = lines(axcore("show", "tiny", "--history", f"{ATTENTION}.position", *flags))
    assert any(line.startswith("use:rope of axcore-rope ") for line in shown)
    assert any(line.startswith(f"--set {ATTENTION}.position.theta=5: set theta (") for line in shown)
    assert all(re.search(r" \(/.*\.py:\d+\)$", line) for line in shown)
    assert lines(axcore("show", "tiny", "--history", "steps"))[0].startswith("recipe tiny: ")
    assert "Did you mean 'steps'" in axcore("show", "tiny", "--history", "step").message


def test_diff_of_a_recipe_with_itself_and_with_another(axcore):
    assert axcore("diff", "tiny", "tiny").out == "no difference\n"
    shown = lines(axcore("diff", "tiny", "quickstart"))
    assert all(line[:2] in ("~ ", "+ ", "- ") for line in shown)


def test_diff_applies_edits_to_the_second_in_their_order(axcore):
    use, value = ("--use", "rope:theta=3e4"), ("--set", f"{ATTENTION}.position.theta=5")
    shown = lines(axcore("diff", "tiny", "tiny", *use, *value))
    assert f"~ {ATTENTION}.position: None -> axcore_rope.rotary.Rotary" in shown
    assert f"+ {ATTENTION}.position.theta: 5.0" in shown
    assert f"no '{ATTENTION}.position.theta'" in axcore("diff", "tiny", "tiny", *value, *use).message
    last = lines(axcore("diff", "tiny", "tiny", "--set", "steps=4", "--set", "steps=5"))
    assert last == ["~ steps: 30 -> 5"]


# The module tree.

ROW = re.compile(
    r"^(?P<name>.*?)  +(?P<count>[\d,]+)  +(?P<size>[\d.]+ \w+)  (?P<supplier>[^ ]+( [\d.]+)?)(?P<settings>  .*)?$"
)


@pytest.mark.parametrize("recipe", ["tiny", "llama2-7b"])
def test_tree_totals_equal_the_number_of_parameters(axcore, recipe):
    params = jax.tree.leaves(abstract(ax.recipe(recipe).model)[1])
    head, *_ = lines(axcore("tree", recipe))
    row = ROW.match(head)
    assert row["name"] == "CausalLM"
    assert int(row["count"].replace(",", "")) == sum(leaf.size for leaf in params)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in params)
    assert row["size"] == {"tiny": f"{size / 1024:.1f} KiB", "llama2-7b": f"{size / 1024**3:.1f} GiB"}[recipe]
    if recipe == "llama2-7b":
        assert row["count"] == "6,738,415,616"  # as in Meta's checkpoint


def test_tree_shows_shapes_axes_bytes_and_suppliers(axcore):
    shown = lines(axcore("tree", "tiny", "--use", "rope"))
    weight = next(line for line in shown if "[16, 264]" in line)
    assert weight.split("─ ")[1].split() == ["weight", "[16,", "264]", "float32", "(embed,", "vocab)", "16.5", "KiB"]
    position = next(line for line in shown if "position  Rotary" in line)
    assert re.match(r".* 0 +0 B  axcore-rope \S+$", position)
    assert all(ROW.match(line)["supplier"] in ("axcore",) for line in shown if "Linear" in line)


def test_tree_shows_settings_without_repeating_other_lines(axcore):
    shown = lines(axcore("tree", "tiny", "--use", "rope:theta=5.0", "--use", "sliding-window:size=7"))
    settings = {line.split("─ ")[-1].split()[0]: ROW.match(line)["settings"] for line in shown if ROW.match(line)}
    assert settings["position"] == "  theta=5.0"
    assert "  mask=Causal() & SameSegment() & SlidingWindow(size=7)" in settings["attention"]
    assert "dim" not in "".join(filter(None, settings.values()))


def test_tree_counts_parameters_and_shows_other_variables(axcore, edit):
    from flax import nnx

    norm = ax.stock(nnx.BatchNorm, widths={"num_features": "input_dim"})
    before = ROW.match(lines(axcore("tree", "tiny"))[0])["count"]
    edit(lambda cfg: cfg.set(model=cfg.model.set(norm=norm)))
    shown = lines(axcore("tree", "tiny"))
    after = ROW.match(shown[0])["count"]
    assert int(after.replace(",", "")) - int(before.replace(",", "")) == 16  # scale and bias in place of scale
    assert any("mean  [16] float32 (-)  64 B  BatchStat" in line for line in shown)
    assert next(line for line in shown if "  BatchNorm " in line).endswith("flax")


def test_tree_of_a_recipe_that_is_a_model(axcore, edit):
    edit(lambda cfg: cfg.model)
    assert lines(axcore("tree", "tiny"))[0].startswith("CausalLM ")


def test_tree_of_a_model_with_a_required_value_names_it(axcore, edit):
    edit(lambda cfg: cfg.set(model=cfg.model.set(dim=ax.REQUIRED)))
    assert "model.dim is REQUIRED" in axcore("tree", "tiny").message
    edit(lambda cfg: cfg.set(model=ax.REQUIRED))
    assert "model is REQUIRED" in axcore("tree", "tiny").message


def test_tree_html_is_written_and_its_path_printed(axcore, tmp_path):
    assert lines(axcore("tree", "tiny", "--html", "page.html")) == [str(tmp_path / "page.html")]
    page = (tmp_path / "page.html").read_text()
    assert "13,136" in page and "TransformerLayer" in page
    assert not re.search(r"(?:src|href)\s*=|https?:|@import|url\(", page)  # nothing is loaded from elsewhere
    assert lines(axcore("tree", "tiny", "--html")) == [str(tmp_path / "tiny.html")]
    (tmp_path / "file").touch()
    for bad in ("file/page.html", "."):
        assert "cannot write" in axcore("tree", "tiny", "--html", bad).message


# Golden files.


@pytest.fixture
def golden(axcore, tmp_path):
    done = axcore("golden", "update")
    assert done.code == 0, done
    return tmp_path / "golden"


def test_golden_update_writes_a_file_for_each_recipe_and_check_passes(axcore, golden):
    assert (golden / "tiny.txt").read_text() == text(ax.recipe("tiny"))
    count = len(list(golden.iterdir()))
    assert axcore("golden", "check").out == f"{count} recipes match golden\n"
    assert lines(axcore("golden", "update", "--folder", "other/deep")) == [f"{count} golden files in other/deep"]
    assert axcore("golden", "check", "--folder", "other/deep").code == 0


def test_golden_check_shows_the_changes(axcore, golden, edit):
    edit(lambda cfg: cfg.set(steps=31))
    message = axcore("golden", "check").message
    assert "axcore golden update" in message and "tiny:\n~ steps: 30 -> 31" in message
    assert "quickstart" not in message
    assert axcore("golden", "update").code == axcore("golden", "check").code == 0


def test_golden_check_names_a_missing_a_stale_and_a_broken_file(axcore, golden):
    (golden / "tiny.txt").rename(golden / "old.txt")
    message = axcore("golden", "check").message
    assert "tiny: the golden file does not exist" in message and "old: the recipe does not exist" in message
    assert "old.txt: no installed plugin" in axcore("golden", "update").out
    assert (golden / "old.txt").exists()
    (golden / "old.txt").unlink()
    assert axcore("golden", "check").code == 0
    (golden / "tiny.txt").write_bytes(b"\xff\xfe")
    assert "tiny.txt" in axcore("golden", "check").message
    (golden / "tiny.txt").write_text("nonsense\nsteps: 30\n")
    assert "tiny:\n" in axcore("golden", "check").message


def test_golden_update_of_a_folder_that_cannot_be_written_fails(axcore, tmp_path):
    (tmp_path / "file").touch()
    assert "file" in axcore("golden", "update", "--folder", "file").message
    assert "file/below" in axcore("golden", "update", "--folder", "file/below").message


# Errors.


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--use", "rope:theta"], "options have the form NAME:KEY=VALUE,... with each key once, not 'rope:theta'"),
        (["--use", "rope:=3"], "rope has no option ''"),
        (["--use", "rope:thet=3"], "Did you mean 'theta'?"),
        (["--use", "rope:theta=abc"], "'abc' is not float"),
        (["--use", "rope:theta=(1"], "'(1' is not float"),
        (["--use", "roep"], "Did you mean 'rope'?"),
        (["--use", ""], "feature ''"),
        (["--use", ":"], "feature ''"),
        (["--use"], "expected one argument"),
        (["--set", "steps"], "--set requires path=value"),
        (["--set", "=3"], "--set requires path=value"),
        (["--set", "step=3"], "Did you mean 'steps'?"),
        (["--set", "steps=many"], "steps must be int"),
        (["--set", "model=3"], "model is a node"),
        (["--set", f"{ATTENTION}.num_heads=2.5"], f"{ATTENTION}.num_heads must be int"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("command", [["show", "tiny"], ["diff", "tiny", "tiny"], ["tree", "tiny"]], ids=" ".join)
def test_invalid_edits_fail_with_one_message_and_exit_code_2(axcore, command, flags, expected):
    assert expected in axcore(*command, *flags).message


def test_json_output_is_strict_json(axcore):
    json.loads(axcore("show", "llama2-7b", "--json").out, parse_constant=pytest.fail)
