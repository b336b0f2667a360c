"""Counts of other systems, on small packages with known answers. Nothing is downloaded."""

import json
import re
import tarfile
import xml.etree.ElementTree as xml
import zipfile

import pytest

from axcore.config import AxcoreError
from axcore_loc import peers
from axcore_loc.cli import main
from axcore_loc.peers import fetch
from axcore_loc.peers.count import count
from axcore_loc.peers.report import Peers
from axcore_loc.peers.systems import SYSTEMS, System
from axcore_loc.peers.words import speaks, words

BIRD = """
class Attention:
    def __init__(self, config):
        self.rotary_emb = Rotary(config.rope_theta)

    def forward(self, q, k):
        return apply_rotary(q), apply_rotary(k)
"""
SOURCES = {
    "zoo/models/heron/modeling.py": BIRD,
    "zoo/models/heron/config.py": "rope_theta = 1\nproperty_of = 2\n",
    "zoo/models/crane/modeling.py": BIRD.replace("rotary_emb", "pos") + "experts = MoE(8)\n",
    "zoo/models/stork_moe/modeling.py": "class StorkMoeMLP: ...\nblock = StorkMoeSparseMoeBlock()\n",
    "zoo/models/crow/modeling.py": '"""No rope."""\nx = 1  # rope\n',
    "zoo/models/crow/generated.py": "# automatically generated from rope.py\nrope = 1\n",
    "zoo/layers/rotary.py": "def apply_rotary(x): ...\nROPE_TYPES = {}\n",
    "zoo/layers/old.py": "print 'rope'\n",
    "zoo/tests/test_rope.py": "rope = 1\n",
    "other/rope.py": "rope = 1\n",
}
ZOO = System("zoo", (("zoo==1",),), re.compile(r"zoo/models/(?P<model>[^/]+)/"), re.compile("zoo/"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("apply_rotary_pos_emb", ("apply", "rotary", "pos", "emb")),
        ("Qwen2MoeMLP", ("qwen", "2", "moe", "mlp")),
        ("RoPEScaling", ("rope", "scaling")),
        ("MoELayer", ("moe", "layer")),
        ("ROPE_INIT", ("rope", "init")),
        ("rotateHalf", ("rotate", "half")),
    ],
)
def test_words(name, said):
    assert words(name) == said


@pytest.mark.parametrize("name", ["property", "europe", "scope", "rotate", "half", "expertise"])
def test_similar_words_do_not_count(name):
    assert not speaks(name, "RoPE") and not speaks(name, "MoE")


def test_name_of_the_model_does_not_count():
    assert speaks("Qwen2MoeMLP", "MoE")
    assert not speaks("Qwen2MoeMLP", "MoE", "qwen2_moe")
    assert speaks("Qwen2MoeSparseMoeBlock", "MoE", "qwen2_moe")


def test_counts_of_a_small_package():
    rope, moe = count(ZOO, "zoo==1", SOURCES)
    assert (rope.models, rope.having, rope.model_modules) == (4, 2, 3)
    assert rope.model_lines == 2 + 1 + 2  # heron: two lines and its config's; crane: two
    assert (rope.shared_modules, rope.shared_lines) == (1, 2)
    assert (rope.per_model, rope.median) == (2.5, 2.5)
    assert (moe.models, moe.having, moe.model_lines, moe.shared_lines) == (4, 2, 2, 0)


def test_one_more_model_adds_its_lines():
    more = SOURCES | {"zoo/models/ibis/modeling.py": BIRD}
    before, after = (count(ZOO, "", sources)[0] for sources in (SOURCES, more))
    assert (after.models - before.models, after.model_lines - before.model_lines) == (1, 2)
    assert after.shared_lines == before.shared_lines


def test_wheels_and_sdists_give_the_same_sources(tmp_path):
    files = {"zoo/a.py": "rope = 1\n", "zoo/b.txt": "no"}
    with zipfile.ZipFile(tmp_path / "zoo-1-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    for name, text in files.items():
        (tmp_path / "zoo-1" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "zoo-1" / name).write_text(text)
    with tarfile.open(tmp_path / "zoo-1.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "zoo-1", "zoo-1")
    expected = {"zoo/a.py": "rope = 1\n"}
    assert fetch.archive_sources(tmp_path / "zoo-1-py3-none-any.whl") == expected
    assert fetch.archive_sources(tmp_path / "zoo-1.tar.gz") == expected
    assert fetch.folder_sources(tmp_path / "zoo-1") == expected


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """Three releases of the small system as folders, and one that is not available."""
    releases = (("zoo@1",), ("zoo@2",), ("zoo@3",), ("zoo@lost",))
    monkeypatch.setattr(peers, "SYSTEMS", (System("zoo", releases, ZOO.models, ZOO.code, "A model is a bird."),))
    monkeypatch.setattr(peers.report, "SYSTEMS", peers.SYSTEMS)
    for number in (1, 2, 3):
        birds = {f"zoo/models/bird{index}/modeling.py": BIRD for index in range(2 * number)}
        for name, text in {**SOURCES, **birds}.items():
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return [f"zoo@{number}={tmp_path / str(number)}" for number in (1, 2, 3)]


def test_the_command_writes_tables_and_plots(zoo, tmp_path, capsys):
    arguments = [part for each in zoo for part in ("--source", each)]
    assert main(["peers", *arguments, "--write", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trends"] == {"zoo": {"RoPE": pytest.approx(2), "MoE": pytest.approx(0)}}
    assert "zoo@lost has no published package" in found["missing"]["zoo@lost"]
    assert json.loads((tmp_path / "out" / "peers.json").read_text()) == found
    table = (tmp_path / "out" / "peers.md").read_text()
    assert "| zoo | 3 | 10 | 8 | 9 | 17 |" in table
    assert str(tmp_path) not in table + json.dumps(found)
    for feature in ("rope", "moe"):
        root = xml.parse(tmp_path / "out" / f"peers-{feature}.svg").getroot()
        assert len(root.findall("{*}circle")) == 3 + 1  # a point for each release, and the legend's


def test_invalid_sources_are_rejected(zoo, tmp_path):
    with pytest.raises(AxcoreError, match="with an existing folder"):
        peers.run(None, ["zoo@1=/no/such/folder"], lambda line: None)
    with pytest.raises(AxcoreError, match="unknown release"):
        peers.run(None, [f"zoo@9={tmp_path}"], lambda line: None)


def test_failed_download_gives_the_reason(tmp_path, monkeypatch):
    failed = fetch.subprocess.CompletedProcess((), 1, "", "ERROR: no such version\n")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(AxcoreError, match=r"cannot download zoo==1 \(ERROR: no such version\)"):
        fetch.sources("zoo==1", tmp_path, {})


def test_model_patterns_of_each_system():
    paths = {
        "transformers": ["transformers/models/llama/modeling_llama.py", "transformers/modeling_rope_utils.py"],
        "torchtitan": ["torchtitan/models/llama3/model/model.py", "torchtitan/models/common/rope.py"],
        "megatron-core": [
            "megatron/core/models/gpt/gpt_model.py",
            "megatron/core/models/common/embeddings/rope_utils.py",
        ],
        "deepspeed": ["deepspeed/module_inject/containers/llama.py", "deepspeed/module_inject/containers/base_moe.py"],
        "maxtext": ["maxtext/models/llama2.py", "maxtext/layers/attentions.py"],
        "praxis and paxml": ["paxml/tasks/lm/params/c4.py", "praxis/layers/attentions.py"],
        "flax examples": ["examples/gemma/transformer.py", "examples/__init__.py"],
        "axlearn": ["axlearn/experiments/text/gpt/fuji.py", "axlearn/experiments/text/gpt/common.py"],
        "axcore": ["axcore_recipes/llama.py", "axcore/nn/attention.py"],
    }
    assert paths.keys() == {system.name for system in SYSTEMS}
    for system in SYSTEMS:
        model, shared = paths[system.name]
        assert system.models.match(model) and not system.models.match(shared), system.name
        assert system.code.match(model) and system.code.match(shared), system.name


def test_installed_axcore_is_counted(tmp_path):
    system = next(system for system in SYSTEMS if system.name == "axcore")
    rope, _ = count(system, "installed", fetch.sources("axcore@installed", tmp_path, {}))
    assert (rope.models, rope.having) == (8, 6)
    assert rope.median <= 2  # a recipe has a line for each call of `use`
    assert Peers((rope,), {}).trend("axcore", "RoPE") is None
