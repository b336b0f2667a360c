"""`axcore quantize`, generation from the folder that it writes, and export."""

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.cli import main
from axcore.config import AxcoreError
from axcore.module import abstract, functional
from axcore.nn import Repeat
from axcore.testing import tiny_batch, tiny_model
from axcore.testing.models import by_path
from axcore.train import ModelFolder, save_model
from axcore.train.checkpoint.model_folder import flat, like
from axcore.train.data import ByteTokenizer
from axcore_int8.commands import quantize

TEXT = "Static scales are measured on this text. " * 20
OPTIONS = {
    "int8:activation_scales=static": (0.2, "int8"),
    "int8:activation_scales=None": (0.02, "int8"),
    "int8": (0.05, "int8"),
    "int4": (0.4, "uint8"),
}
"""Numerics -> largest relative error of the logits, dtype of the codes."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model folder in floats."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    tokenizer = ByteTokenizer.Config()
    cfg = ax.select(tiny_model(), Repeat).set(num_layers=4).set(vocab_size=tokenizer.build().vocab_size)
    _, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    return save_model(folder, cfg, params, state, tokenizer=tokenizer)


def logits(folder):
    found = ModelFolder.open(folder)
    fn, params, state = abstract(found.model)
    arrays, missing, extra = found.load(found.model, flat(params), flat(state))
    assert not missing and not extra
    held = like(params, arrays)
    return np.asarray(jax.jit(fn)(held, like(state, arrays), tiny_batch()["inputs"])[0][0]), by_path(held)


@pytest.mark.parametrize(
    "numerics",
    [pytest.param(each, marks=pytest.mark.slow if i else pytest.mark.long) for i, each in enumerate(OPTIONS)],
)
def test_a_quantized_folder_generates(numerics, trained, tmp_path, capfd):
    error, dtype = OPTIONS[numerics]
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    calibration = ["--text", str(text), "--tokens", "200", "--seq-len", "64"] if "static" in numerics else []
    assert quantize([str(trained), str(tmp_path / "small"), "--use", numerics, *calibration]) == 0
    (exact, _), (found, params) = logits(trained), logits(tmp_path / "small")
    assert 0 < np.linalg.norm(found - exact) < error * np.linalg.norm(exact)
    kinds = {leaf.dtype.name for path, leaf in params.items() if path.endswith(".weight.codes")}
    assert kinds == {dtype}
    capfd.readouterr()
    assert main(["generate", str(tmp_path / "small"), "--prompt", "ab", "--tokens", "3"]) == 0
    assert capfd.readouterr().out.startswith("ab")


def test_static_scales_require_a_text(trained, tmp_path):
    arguments = [str(trained), str(tmp_path / "small"), "--use", "int8:activation_scales=static"]
    with pytest.raises(ax.ConfigError, match=r"^model\..*numerics: input_amax is not measured .*--text FILE"):
        quantize(arguments)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    for options, message in (
        (["--text", str(short)], r"short\.txt has 9 tokens, fewer than --seq-len 512"),
        (["--text", str(short), "--tokens", "8"], "--seq-len 512 must be from 1 to --tokens 8"),
        (["--text", str(short), "--seq-len", "0"], "--seq-len 0 must be from 1"),
        (["--text", str(tmp_path / "none.txt")], r"cannot read --text .*none\.txt: No such file"),
    ):
        with pytest.raises(AxcoreError, match=message):
            quantize([*arguments, *options])
    with pytest.raises(ax.ConfigError, match="no numerics in the config are calibrated"):
        quantize([*arguments[:3], "int4", "--text", str(short), "--seq-len", "4"])
    assert not (tmp_path / "small").exists()


def test_only_numerics_of_a_float_model_are_accepted(trained, tmp_path):
    with pytest.raises(AxcoreError, match=r"--use lora adds parameters .*It must name numerics"):
        quantize([str(trained), str(tmp_path / "small"), "--use", "lora"])
    quantize([str(trained), str(tmp_path / "small"), "--use", "int4"])
    with pytest.raises(AxcoreError, match=r"small is quantized already \(model\.decoder.*numerics\)"):
        quantize([str(tmp_path / "small"), str(tmp_path / "smaller"), "--use", "int8"])


@pytest.mark.long
def test_stored_weights_are_not_exported(trained, tmp_path, capfd):
    """A published family has no such numerics."""
    quantize([str(trained), str(tmp_path / "small"), "--use", "int4"])
    assert main(["export", str(tmp_path / "small"), str(tmp_path / "exported")]) == 2
    assert "query.numerics (layers 0-3): the model has Int4(stored=True)" in capfd.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("length", [None, 4], ids=["float", "another length"])
def test_histories_of_training_are_not_required(length, trained, tmp_path):
    pytest.importorskip("axcore_fp8")
    folder = trained
    if length is not None:
        folder, found = tmp_path / "delayed", ModelFolder.open(trained)
        cfg = ax.use("fp8", scaling="delayed", amax_history_len=length)(found.model)
        _, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
        save_model(folder, cfg, params, state, tokenizer=found.tokenizer)
    quantize([str(folder), str(tmp_path / "small"), "--use", "fp8:scaling=delayed"])
    assert np.isfinite(logits(tmp_path / "small")[0]).all()


@pytest.mark.long
@pytest.mark.parametrize("trained_with", ["fp8", "int8"])
def test_stored_weights_replace_the_number_format_of_training(trained_with, trained, tmp_path, capfd):
    pytest.importorskip("axcore_fp8")
    found = ModelFolder.open(trained)
    shapes = abstract(found.model)[1:]
    arrays = found.load(found.model, *map(flat, shapes))[0]
    # Stacked like the trained model, so that its arrays are used as they are.
    cfg = ax.use(trained_with, where="decoder.**")(found.model)
    save_model(tmp_path / "run", cfg, like(shapes[0], arrays), tokenizer=found.tokenizer)
    for use in ("int4", "int8:activation_scales=None"):
        quantize([str(trained), str(tmp_path / f"expected {use}"), "--use", use])
        assert "replaces" not in capfd.readouterr().out
        quantize([str(tmp_path / "run"), str(tmp_path / use), "--use", use])
        assert f"; {use} replaces the number formats of training" in capfd.readouterr().out
        assert ModelFolder.open(tmp_path / use).model == ModelFolder.open(tmp_path / f"expected {use}").model
        np.testing.assert_array_equal(logits(tmp_path / use)[0], logits(tmp_path / f"expected {use}")[0])
