"""Low-rank changes of every family: the changed weights are those of a checkpoint that was changed by hand."""

import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy

from axcore.module import abstract
from axcore.nn import by_layer
from axcore.train.checkpoint.initial import initial_arrays
from axcore.train.checkpoint.model_folder import flat
from axcore_hf.checkpoint import Checkpoint
from axcore_hf.initial import FromHF
from axcore_hf.low_rank import Factors, LinearNames

RECORDED = pathlib.Path(__file__).parent / "parity/recorded"
FAMILIES = sorted(each.parent.name for each in RECORDED.glob("*/model.safetensors"))
IN_CI = ("deepseek_v3", "falcon_new", "gpt2", "gpt_neox", "mixtral", "phi3")
RANK = 3


def parameters(folder):
    """The parameters of a checkpoint, by layer."""
    model = Checkpoint.open(f"hf:{folder}").model
    _, params, state = abstract(model)
    arrays = initial_arrays(FromHF.Config(source=f"hf:{folder}"), model, flat(params), flat(state), 0)
    return {name: np.asarray(arrays[path][index]) for name, (path, index) in by_layer(model, flat(params)).items()}


def is_linear(name):
    return name.endswith(".weight") and not name.startswith(("embedding.", "position."))


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=pytest.mark.long if each in IN_CI else pytest.mark.slow) for each in FAMILIES]
)
def test_changes_are_those_of_a_checkpoint_that_was_changed_by_hand(family, tmp_path):
    base, model = parameters(RECORDED / family), Checkpoint.open(f"hf:{RECORDED / family}").model
    held = safetensors.numpy.load_file(RECORDED / family / "model.safetensors")
    others = ("embed", "wte", "wpe", "norm")
    if model.head is None:
        others += ("lm_head",)
    rng, given = np.random.default_rng(0), {}
    for name, weight in held.items():
        if not name.endswith(".weight") or weight.ndim != 2 or any(each in name for each in others):
            continue
        is_transposed = family == "gpt2" and name != "lm_head.weight"
        into, out = weight.shape if is_transposed else weight.shape[::-1]
        a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((RANK, into), (out, RANK)))
        given[name.removesuffix(".weight")] = Factors(a, b)
        held[name] = (weight + ((b @ a).T if is_transposed else b @ a)).astype(weight.dtype)
    shutil.copytree(RECORDED / family, tmp_path / "changed", ignore=shutil.ignore_patterns("gradients", "*.npz"))
    safetensors.numpy.save_file(held, tmp_path / "changed/model.safetensors")
    expected = parameters(tmp_path / "changed")

    names = LinearNames(model, [name.removesuffix(".weight") for name in base if is_linear(name)])
    found = names.read(given, "the adapter")
    assert {name for name in base if not np.array_equal(base[name], expected[name])} == {
        f"{each}.weight" for each in found
    }
    for name, (factors, modules) in found.items():
        assert set(modules) <= given.keys()
        changed = base[f"{name}.weight"] + np.matmul(factors.a, factors.b)
        np.testing.assert_allclose(changed, expected[f"{name}.weight"], rtol=1e-5, atol=1e-5, err_msg=name)

    back = names.write({name: factors for name, (factors, _) in found.items() if factors.a.ndim == 2})
    assert back.keys() == {name for name in given if ".experts." not in name}
    for name, (a, b) in back.items():
        np.testing.assert_array_equal(a, given[name].a, err_msg=name)
        np.testing.assert_array_equal(b, given[name].b, err_msg=name)


def test_the_language_part_of_a_multimodal_model_has_the_names_of_the_language_model():
    model = Checkpoint.open(f"hf:{RECORDED / 'gemma3'}").model
    rng = np.random.default_rng(0)
    weight = safetensors.numpy.load_file(RECORDED / "gemma3/model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    factors = Factors(rng.normal(size=(2, weight.shape[1])), rng.normal(size=(weight.shape[0], 2)))
    names = LinearNames(model, ["decoder.0.ffn.up"])
    for name in ("model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"):
        ((found, (_, modules)),) = names.read({name: factors}, "the adapter").items()
        assert (found, modules) == ("decoder.0.ffn.up", (name,))
