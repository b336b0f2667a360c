"""`axcore loc check`, in small repositories."""

import subprocess

import pytest

from axcore_loc.check import check
from axcore_loc.cli import main
from axcore_loc.git import GitError

PYPROJECT = '[project]\nname = "axcore-gate"\n[project.entry-points."axcore.plugins"]\ngate = "axcore_gate.plugin"\n'
PLUGIN = """
from axcore.plugin import Feature

def axcore_features():
    return [Feature("gate", "axcore_gate.gate:use_gate", "A gate.")]
"""
FILES = {
    "src/axcore/nn/attention.py": "heads = 1\nkeys = 2\n",
    "src/axcore/train/step.py": "step = 1\n",
    "recipes/src/axcore_recipes/llama.py": "layers = 32\n",
    "tests/test_attention.py": "assert True\n",
    "plugins/axcore-rope/src/axcore_rope/rotary.py": "theta = 1\n",
    "docs/index.md": "axcore\n",
}


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q", "-b", "main")
    write(tmp_path, FILES)
    commit(tmp_path)
    return tmp_path


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def write(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def commit(folder):
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "a change")


def add_plugin(folder, plugin=PLUGIN):
    write(
        folder,
        {
            "plugins/axcore-gate/pyproject.toml": PYPROJECT,
            "plugins/axcore-gate/src/axcore_gate/plugin.py": plugin,
            "plugins/axcore-gate/src/axcore_gate/gate.py": "gate = 1\n",
        },
    )


def test_separate_plugin_passes(repository):
    add_plugin(repository)
    found = check(repository, "HEAD")
    assert [offer[:2] for offer in found.features] == [("Feature", "gate")]
    assert (found.touched, found.guarded_lines, found.passes) == ((), 0, True)


@pytest.mark.parametrize("committed", [False, True])
def test_changed_lines_in_nn_exceed_the_budget(repository, committed):
    add_plugin(repository)
    write(
        repository,
        {
            "src/axcore/nn/attention.py": "heads = 1\nkeys = 3\ngate = 4\n",
            "recipes/src/axcore_recipes/llama.py": "# a comment is not code\nlayers = 32\n",
            "src/axcore/train/step.py": "step = 2\n",
            "tests/test_attention.py": "assert 1\n",
            "plugins/axcore-rope/src/axcore_rope/rotary.py": "theta = 2\n",
            "docs/index.md": "axcore, more\n",
        },
    )
    if committed:
        commit(repository)
    found = check(repository, "HEAD~1" if committed else "HEAD")
    assert found.by_owner() == {"nn": 2, "recipes": 0, "rest of the core": 1, "tests": 1, "other plugins": 1}
    assert (found.guarded_lines, found.passes) == (2, False)
    assert "src/axcore/nn/attention.py" in found.as_text()
    assert check(repository, "HEAD~1" if committed else "HEAD", budget=2).passes


def test_exit_code_is_one_over_the_budget(repository, monkeypatch, capsys):
    monkeypatch.chdir(repository / "docs")
    add_plugin(repository)
    assert main(["check", "--base", "HEAD"]) == 0
    write(repository, {"recipes/src/axcore_recipes/llama.py": "layers = 33\n"})
    assert main(["check", "--base", "HEAD"]) == 1
    assert "1 lines, OVER the budget of 0" in capsys.readouterr().out
    assert main(["check", "--base", "HEAD", "--budget", "1", "--json"]) == 0


def test_deleted_files_count_and_moved_files_do_not(repository):
    add_plugin(repository)
    git(repository, "mv", "src/axcore/nn/attention.py", "src/axcore/nn/attend.py")
    (repository / "recipes/src/axcore_recipes/llama.py").unlink()
    found = check(repository, "HEAD")
    assert {each.path: each.lines for each in found.touched} == {"recipes/src/axcore_recipes/llama.py": 1}
    assert not found.passes


def test_change_without_a_feature_passes(repository):
    write(repository, {"src/axcore/nn/attention.py": "heads = 2\n"})
    add_plugin(repository, PLUGIN.replace("Feature", "Command"))
    found = check(repository, "HEAD")
    assert found.passes and not found.features
    assert "no feature is added" in found.as_text()


def test_existing_feature_is_not_new(repository):
    add_plugin(repository)
    commit(repository)
    write(
        repository,
        {
            "plugins/axcore-gate/src/axcore_gate/gate.py": "gate = 2\n",
            "src/axcore/nn/attention.py": "heads = 2\n",
        },
    )
    assert not check(repository, "HEAD").features


def test_existing_plugin_may_add_a_feature(repository):
    add_plugin(repository)
    commit(repository)
    more = PLUGIN.replace("[Feature", '[Feature(name="other", target="a:b", summary=""), Feature')
    add_plugin(repository, more)
    write(repository, {"plugins/axcore-gate/src/axcore_gate/gate.py": "gate = 2\n"})
    found = check(repository, "HEAD")
    assert [offer[:2] for offer in found.features] == [("Feature", "other")]
    assert found.by_owner() == {"nn": 0, "recipes": 0, "the plugin itself": 2}


def test_recipes_may_add_an_offer(repository):
    pyproject = PYPROJECT.replace("axcore_gate", "axcore_recipes").replace("gate", "recipes")
    listed = "recipes/src/axcore_recipes/plugin.py"
    write(repository, {"recipes/pyproject.toml": pyproject, listed: PLUGIN})
    commit(repository)
    write(repository, {listed: PLUGIN.replace("[Feature", '[MeshRule("tpu", "a:b", "", pattern="tpu-*"), Feature')})
    found = check(repository, "HEAD")
    assert [offer[:2] for offer in found.features] == [("MeshRule", "tpu")]
    assert found.by_owner() == {"nn": 0, "recipes": 0, "the plugin itself": 1}


def test_templates_are_not_distributions(repository):
    write(repository, {f"src/axcore/templates/{name}": text for name, text in {"pyproject.toml": PYPROJECT}.items()})
    write(repository, {"src/axcore/templates/src/axcore_gate/plugin.py": PLUGIN})
    assert not check(repository, "HEAD").features


def test_git_errors(repository, tmp_path_factory):
    with pytest.raises(GitError, match=r"--base v9: the commit does not exist here; give a branch"):
        check(repository, "v9")
    first = git(repository, "rev-parse", "HEAD").strip()
    add_plugin(repository)
    commit(repository)
    clone = tmp_path_factory.mktemp("clone")
    git(clone, "clone", "-q", "--depth=1", f"file://{repository}", "shallow")
    with pytest.raises(GitError, match=r"this clone is shallow .* git fetch --unshallow"):
        check(clone / "shallow", first)
    with pytest.raises(GitError, match="is not in a git repository"):
        check(clone, "HEAD")
