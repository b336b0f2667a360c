"""Export to other dtypes, of changed models and of quantized models."""

import json

import ml_dtypes
import numpy as np
import pytest

from axcore.config import AxcoreError
from axcore_hf.commands import PUBLISHED, convert, export

from .parity.test_parity import RECORDED, tensors


@pytest.fixture
def model(tmp_path):
    """A model folder of a small Llama in bfloat16."""
    convert([f"hf:{RECORDED / 'llama'}", str(tmp_path / "model"), "--dtype", "bfloat16"])
    return tmp_path / "model"


def described(folder):
    return json.loads((folder / "config.json").read_text())


def test_export_uses_the_requested_dtype(model, tmp_path):
    export([str(model), str(tmp_path / "same")])
    export([str(model), str(tmp_path / "wide"), "--dtype", "float32"])
    same, wide = tensors(tmp_path / "same"), tensors(tmp_path / "wide")
    for name, tensor in tensors(RECORDED / "llama").items():
        np.testing.assert_array_equal(same[name], tensor.astype(ml_dtypes.bfloat16), err_msg=name)
        np.testing.assert_array_equal(wide[name], same[name].astype(np.float32), err_msg=name)
        assert (same[name].dtype, wide[name].dtype) == (ml_dtypes.bfloat16, np.float32)
    assert (described(tmp_path / "same")["dtype"], described(tmp_path / "wide")["dtype"]) == ("bfloat16", "float32")


def test_an_exported_config_is_not_marked_as_quantized(model, tmp_path):
    raw = json.loads((model / PUBLISHED).read_text())
    (model / PUBLISHED).write_text(json.dumps({**raw, "quantization_config": None}))
    export([str(model), str(tmp_path / "out")])
    assert "quantization_config" not in described(tmp_path / "out")


def test_differing_options_are_reported_and_shapes_rejected(model, tmp_path, capsys):
    raw = json.loads((model / PUBLISHED).read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**raw, "rms_norm_eps": 0.5}))
    export([str(model), str(tmp_path / "changed"), "--config", str(other)])
    assert (
        "other.json differs from the model in:\n  norm.eps: 0.5 in the config, 1e-06 in the model"
        in capsys.readouterr().err
    )
    other.write_text(json.dumps({**raw, "intermediate_size": 7}))
    with pytest.raises(AxcoreError, match=r"other\.json describes a different model:\n  decoder\.0\.ffn\."):
        export([str(model), str(tmp_path / "out"), "--config", str(other)])
    assert not (tmp_path / "out").exists()


def test_export_without_a_published_config_is_rejected(model, tmp_path):
    (model / PUBLISHED).unlink()
    with pytest.raises(AxcoreError, match="requires --config FILE"):
        export([str(model), str(tmp_path / "out")])
    with pytest.raises(AxcoreError, match="--shard-gib must be positive, not 0"):
        export([str(model), str(tmp_path / "out"), "--config", str(RECORDED / "llama/config.json"), "--shard-gib", "0"])
