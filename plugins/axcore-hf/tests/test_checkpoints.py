"""Damaged and unusual checkpoints, edge cases of conversion and export, and custom families."""

import dataclasses
import json
import re
import shutil
import sys
import types
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import safetensors.numpy

from axcore.config import AxcoreError
from axcore.nn import RMSNorm
from axcore.train import ModelFolder
from axcore_hf import checkpoint as checkpoint_module, families, owners
from axcore_hf.checkpoint import Checkpoint
from axcore_hf.commands import convert, export
from axcore_hf.families.llama import RULES, llama
from axcore_hf.families.rope import ROPE
from axcore_hf.families.shared import fixed
from axcore_hf.family import Family
from axcore_hf.sources import INDEX, SINGLE
from axcore_hf.tokenizer import HFTokenizer
from axcore_hf.transforms import ByHead, Fused, Interleaved, InterleavedRope, Stacked, Transposed

from .parity.test_parity import RECORDED, tensors


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of a small Llama."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(RECORDED / "llama", folder, ignore=shutil.ignore_patterns("gradients", "*.npz"))
    return folder


def rewrite(folder, edit):
    held = tensors(folder)
    edit(held)
    safetensors.numpy.save_file(held, folder / SINGLE, metadata={"format": "pt"})


def change_config(folder, **fields):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **fields}))


def test_wrong_tensors_are_listed_and_nothing_is_written(checkpoint, tmp_path):
    def damage(held):
        held["model.layers.0.self_attn.q_prjo.weight"] = held.pop("model.layers.0.self_attn.q_proj.weight")
        held["model.norm.weight"] = np.ones((3,), np.float32)
        held["surplus"] = np.ones((1,), np.float32)

    rewrite(checkpoint, damage)
    with pytest.raises(AxcoreError) as caught:
        convert([f"hf:{checkpoint}", str(tmp_path / "out")])
    message = str(caught.value)
    missing = "missing: model.layers.0.self_attn.q_proj.weight (parameter decoder.0.attention.query.weight)"
    assert f"{missing}. Did you mean 'model.layers.0.self_attn.q_prjo.weight'?" in message
    assert "wrong shape: model.norm.weight (parameter norm.scale) is (3,), expected (16,)" in message
    assert "unknown: surplus (1,)" in message and "unknown: model.layers.0.self_attn.q_prjo.weight" in message
    assert not (tmp_path / "out").exists()


def test_nan_weights_are_rejected(checkpoint, tmp_path):
    rewrite(checkpoint, lambda held: held["model.norm.weight"].__setitem__(0, np.nan))
    with pytest.raises(
        AxcoreError, match=r"has values that are not finite:\n  model\.norm\.weight \(parameter norm\.scale\)"
    ):
        convert([f"hf:{checkpoint}", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_scale_without_a_float8_tensor_is_unknown(checkpoint, tmp_path):
    rewrite(checkpoint, lambda held: held.update({"model.norm.weight_scale_inv": np.full((1, 1), 7.0, np.float32)}))
    with pytest.raises(AxcoreError, match=r"unknown: model\.norm\.weight_scale_inv \(1, 1\)"):
        convert([f"hf:{checkpoint}", str(tmp_path / "out")])


def test_integer_weights_are_rejected(checkpoint, tmp_path):
    rewrite(checkpoint, lambda held: held.update({"model.norm.weight": np.ones((16,), np.int32)}))
    with pytest.raises(AxcoreError, match=r"model\.norm\.weight has the dtype int32, but weights must be"):
        convert([f"hf:{checkpoint}", str(tmp_path / "out")])


@pytest.mark.parametrize("kept", [4, 100, -10])
def test_a_truncated_file_is_reported(checkpoint, tmp_path, kept):
    content = (checkpoint / SINGLE).read_bytes()
    (checkpoint / SINGLE).write_bytes(content[:kept])
    with pytest.raises(AxcoreError, match=r"model\.safetensors is truncated or not a safetensors file"):
        convert([f"hf:{checkpoint}", str(tmp_path / "out")])


def test_index_files_are_read_and_checked(checkpoint, tmp_path):
    held = tensors(checkpoint)
    names = sorted(held)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in parts.items():
        safetensors.numpy.save_file({name: held[name] for name in some}, checkpoint / file)
    (checkpoint / SINGLE).unlink()
    weights = {name: file for file, some in parts.items() for name in some}
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": weights}))
    convert([f"hf:{checkpoint}", str(tmp_path / "out")])
    export([str(tmp_path / "out"), str(tmp_path / "back"), "--shard-gib", "0.000005"])
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 2 and index["weight_map"].keys() == held.keys()
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "back" / file, "numpy") as opened:
            np.testing.assert_array_equal(opened.get_tensor(name), held[name])
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": {**weights, "more": "a.safetensors"}}))
    with pytest.raises(AxcoreError, match="lists tensors that its files do not have: more"):
        convert([f"hf:{checkpoint}", str(tmp_path / "other")])
    (checkpoint / INDEX).write_text("[]")
    with pytest.raises(AxcoreError, match="is not an index of a checkpoint"):
        convert([f"hf:{checkpoint}", str(tmp_path / "other")])
    (checkpoint / INDEX).unlink()
    with pytest.raises(AxcoreError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        convert([f"hf:{checkpoint}", str(tmp_path / "other")])
    safetensors.numpy.save_file(held, checkpoint / SINGLE)
    (checkpoint / INDEX).write_text("[]")  # ignored if there is a single file
    convert([f"hf:{checkpoint}", str(tmp_path / "other")])


def test_unsupported_config_fields_are_rejected_by_name(checkpoint, tmp_path):
    change_config(checkpoint, residual_multiplier=0.5)
    with pytest.raises(AxcoreError, match=r"not supported for model_type 'llama': residual_multiplier=0\.5"):
        convert([f"hf:{checkpoint}", str(tmp_path / "out")])
    change_config(checkpoint, model_type="granite_swa")
    with pytest.raises(
        AxcoreError,
        match=r"model_type='granite_swa' is not supported.*Fields that the family llama does not have: residual_m",
    ):
        convert([f"hf:{checkpoint}", str(tmp_path / "out")])
    change_config(checkpoint, model_type="llama", rope_parameters={"rope_type": "spiral"})
    with pytest.raises(AxcoreError, match=r"rope_type='spiral' is not supported"):
        convert([f"hf:{checkpoint}", str(tmp_path / "out")])
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(AxcoreError, match="is not JSON"):
        convert([f"hf:{checkpoint}", str(tmp_path / "out")])


def test_case_more_layers_than_tensors_are_refused_before_they_are_made(checkpoint):
    change_config(checkpoint, num_hidden_layers=10**12)  # a list of them does not fit in memory
    with pytest.raises(AxcoreError, match=r"num_hidden_layers=1000000000000, but the checkpoint has only \d+ tensors"):
        Checkpoint.open(f"hf:{checkpoint}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "is not a checkpoint. Give hf:DIR, gguf:FILE or gguf:package:NAME"),
        ("hf:/no/such/folder", "is not a folder"),
        ("gguf:/no/such/file.gguf", "does not exist|No such file"),
        ("gguf:package:json", "no package 'json' with a GGUF file is installed"),
    ],
)
def test_invalid_sources_are_rejected(source, message, tmp_path):
    with pytest.raises(AxcoreError, match=message):
        convert([source, str(tmp_path / "out")])


def test_existing_files_are_not_overwritten(checkpoint, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(AxcoreError, match="already exists"):
        convert([f"hf:{checkpoint}", str(tmp_path / "out")])
    convert([f"hf:{checkpoint}", str(tmp_path / "model")])
    with pytest.raises(AxcoreError, match="already exists"):
        export([str(tmp_path / "model"), str(tmp_path / "out")])


def vocabulary(folder, count):
    """A tokenizer with the given number of ids."""
    from tokenizers import Tokenizer, models

    file = folder / "tokenizer.json"
    Tokenizer(models.WordLevel({f"w{number}": number for number in range(count)}, "w0")).save(str(file))
    return file


def test_tokenizer_must_fit_the_vocab_size(checkpoint, tmp_path, capsys):
    vocabulary(checkpoint, 65)
    with pytest.raises(AxcoreError, match="has 65 ids, but the model has vocab_size=64"):
        convert([f"hf:{checkpoint}", str(tmp_path / "out")])
    vocabulary(checkpoint, 64)
    convert([f"hf:{checkpoint}", str(tmp_path / "out")])
    tokenizer = ModelFolder.open(tmp_path / "out").tokenizer.build()
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (64, (2,))
    (checkpoint / "tokenizer.json").unlink()
    convert([f"hf:{checkpoint}", str(tmp_path / "without")])
    assert "no tokenizer found" in capsys.readouterr().err
    convert([f"hf:{checkpoint}", str(tmp_path / "given"), "--tokenizer", str(vocabulary(tmp_path, 60))])
    assert ModelFolder.open(tmp_path / "given").tokenizer.build().vocab_size == 60


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(0, [0, 1], (0, 1)), (1, [0, 1], (1, 0)), (None, 3, (3,)), (2, None, (2,)), ([4, 5], 5, (5,))],
)
def test_case_generation_config_has_the_ids_that_end_a_text(checkpoint, config, generation, expected):
    vocabulary(checkpoint, 60)
    change_config(checkpoint, eos_token_id=config)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert Checkpoint.open(f"hf:{checkpoint}").tokenizer.eos_ids == expected


def test_case_truncation_and_padding_of_a_tokenizer_file_are_ignored(tmp_path):
    from tokenizers import Tokenizer, pre_tokenizers

    file = vocabulary(tmp_path, 61)
    limited = Tokenizer.from_file(str(file))
    limited.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    limited.enable_truncation(16)
    limited.enable_padding(length=32)
    limited.save(str(file))
    tokenizer = HFTokenizer.Config(file=str(file)).build()
    document = " ".join(f"w{number}" for number in range(61)).encode()
    assert tokenizer.encode(document).tolist() == [*range(61)]
    assert tokenizer.prompt(b"w7 w8").tolist() == [7, 8]


@pytest.mark.parametrize("ids", ["a", -1, 1.5, True, [[1]], [0, "b"]])
def test_case_ids_that_are_no_token_ids_are_refused_by_file(checkpoint, ids):
    vocabulary(checkpoint, 60)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    message = re.escape(f"eos_token_id={ids!r} must be a token id, a list of token ids, or null")
    with pytest.raises(AxcoreError, match=rf"generation_config\.json: {message}"):
        Checkpoint.open(f"hf:{checkpoint}")
    change_config(checkpoint, eos_token_id=ids)
    with pytest.raises(AxcoreError, match=f"^config.json: {message}"):
        Checkpoint.open(f"hf:{checkpoint}")


def test_case_a_model_type_that_is_not_a_string_is_refused(checkpoint):
    change_config(checkpoint, model_type=["llama"])
    with pytest.raises(AxcoreError, match=r"model_type=\['llama'\] is not supported\. It must be a string"):
        Checkpoint.open(f"hf:{checkpoint}")


def test_case_a_pointer_of_git_lfs_is_explained(checkpoint):
    (checkpoint / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n")
    with pytest.raises(AxcoreError, match="Download it again; in a clone with Git, run `git lfs pull`"):
        Checkpoint.open(f"hf:{checkpoint}")


def test_an_entry_point_adds_a_family(checkpoint, tmp_path, monkeypatch):
    module = types.ModuleType("my_family")
    module.FAMILY = Family("My model", ("mymodel",), llama, fixed(RULES), defaults=ROPE)
    module.WRONG = 3
    monkeypatch.setitem(sys.modules, "my_family", module)
    points = [
        EntryPoint("mymodel", "my_family:FAMILY", owners.GROUP),
        EntryPoint("bad", "my_family:WRONG", owners.GROUP),
    ]
    monkeypatch.setattr(owners, "entry_points", lambda group: points)
    families._owners.cache_clear()
    try:
        change_config(checkpoint, model_type="mymodel")
        convert([f"hf:{checkpoint}", str(tmp_path / "out")])
        export([str(tmp_path / "out"), str(tmp_path / "back")])
        for name, tensor in tensors(checkpoint).items():
            np.testing.assert_array_equal(tensors(tmp_path / "back")[name], tensor)
        change_config(checkpoint, model_type="bad")
        with pytest.raises(AxcoreError, match="my_family:WRONG, is a int, not a Family"):
            convert([f"hf:{checkpoint}", str(tmp_path / "other")])
    finally:
        families._owners.cache_clear()


class OwnNorm(RMSNorm):
    """A layer of a package that is not installed."""

    class Config(RMSNorm.Config):
        pass


def test_case_a_model_folder_that_no_process_can_open_is_not_written(checkpoint, tmp_path, monkeypatch):
    own = dataclasses.replace(families.by_type("llama"), model=lambda fields: llama(fields).set(norm=OwnNorm.Config()))
    monkeypatch.setattr(checkpoint_module, "family_of", lambda fields: own)
    with pytest.raises(AxcoreError, match=r"OwnNorm belongs to no package that an installed distribution registers"):
        convert([f"hf:{checkpoint}", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("transform", "shapes"),
    [
        (Transposed(), [(3, 4)]),
        (Fused(), [(3, 4), (3, 2), (3, 2)]),
        (Fused(), [(4,), (2,)]),
        (Fused(transposed=False), [(3, 4), (3, 4)]),
        (ByHead(2), [(3, 4), (3, 6)]),
        (Interleaved(), [(2, 3, 4), (2, 3, 4)]),
        (Stacked(), [(3, 2, 4)]),
        (InterleavedRope(2), [(3, 8)]),
    ],
)
def test_written_tensors_can_be_read_again(transform, shapes):
    random = np.random.default_rng(0)
    ours = [random.normal(size=shape) for shape in shapes]
    theirs = transform.write(ours)
    assert [each.shape for each in theirs] == transform.expected(shapes)
    back = [np.zeros(shape) for shape in shapes]
    names = [str(number) for number in range(len(theirs))]
    for which, index, part in transform.pieces(lambda name: theirs[int(name)], names, shapes):
        back[which][index] = part
    for found, each in zip(back, ours, strict=True):
        np.testing.assert_array_equal(found, each)


def test_interleaved_rope_rows_are_reordered_into_halves():
    theirs = np.arange(8.0)[:, None]  # one head of 8 rows: pairs (0, 1), (2, 3), ...
    (ours,) = InterleavedRope(1).read([theirs], [(1, 8)])
    np.testing.assert_array_equal(ours[0], [0, 2, 4, 6, 1, 3, 5, 7])
