"""Each family against recorded values of `transformers` for the same checkpoint (see record.py).

The rows are longer than every window (7) and every original length (16). Packed documents are shorter than the latter.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from axcore.module import abstract
from axcore.train import CrossEntropy, save_model
from axcore.train.checkpoint.initial import initial_arrays
from axcore.train.checkpoint.model_folder import flat, like
from axcore_hf import importing
from axcore_hf.checkpoint import Checkpoint
from axcore_hf.commands import convert, export
from axcore_hf.initial import FromHF
from axcore_hf.sources import Safetensors

from .seeded import implementation

pytestmark = pytest.mark.long

RECORDED = pathlib.Path(__file__).parent / "recorded"
FAMILIES = sorted(folder.name for folder in RECORDED.iterdir() if folder.is_dir())
DIFFERENT = (
    *("cohere2", "deepseek_v3", "falcon_rw", "gemma3", "gpt2", "gpt_oss", "granite", "qwen2_moe"),
    "stablelm_parallel",
)
"""Families with the most options of their own. CI compares the gradients of these."""
TOLERANCE = 1e-4
NOTHING = 1e-6  # relative to the largest gradient; smaller gradients are rounding errors of zero
SHORT = 10  # tokens of the first document of a packed row


@functools.cache
def loaded(family):
    """(the checkpoint, pure function, parameters, other state)."""
    name = f"hf:{RECORDED / family}"
    found = Checkpoint.open(name)
    fn, params, state = abstract(found.model)
    arrays = initial_arrays(FromHF.Config(source=name), found.model, flat(params), flat(state), 0)
    return found, fn, like(params, arrays), like(state, arrays)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_parity_of_logits(family):
    _, fn, params, state = loaded(family)
    reference = np.load(RECORDED / family / "reference.npz")
    ids = reference["ids"].astype(np.int32)
    plain = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    restarted = np.where(plain < SHORT, plain, plain - SHORT)
    from_first = np.maximum(np.cumsum(reference["left_mask"], axis=1, dtype=np.int32) - 1, 0)
    one, two = np.zeros(ids.shape, np.int32), (plain >= SHORT).astype(np.int32)
    everything = np.ones(ids.shape, bool)

    @jax.jit
    def logits(positions, segment_ids, valid):
        return fn(params, state, ids, positions=positions, segment_ids=segment_ids, valid=valid)[0][0]

    cases = {
        "plain": (plain, one, everything),
        # Falcon's rounded biases depend on where the row starts.
        "left": (from_first if family == "falcon_rw" else plain, one, reference["left_mask"] == 1),
        "right": (plain, one, reference["right_mask"] == 1),
    }
    for name, (positions, segments, valid) in cases.items():
        found = np.asarray(logits(positions, segments, valid))
        np.testing.assert_allclose(found[valid], reference[name][valid], rtol=0, atol=TOLERANCE, err_msg=name)
    found = np.asarray(logits(restarted, two, everything))
    np.testing.assert_allclose(found, reference["packed"], rtol=0, atol=TOLERANCE, err_msg="packed")


@pytest.mark.parametrize(
    "family", [family if family in DIFFERENT else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_parity_of_gradients(family):
    found, fn, params, state = loaded(family)
    reference = np.load(RECORDED / family / "reference.npz")
    ids = jnp.asarray(reference["ids"], jnp.int32)
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "weights": jnp.ones((ids.shape[0], ids.shape[1] - 1))}

    objective = CrossEntropy.Config().build()

    @jax.jit
    def loss_and_gradients(params):
        return jax.value_and_grad(lambda params: fn(params, state, batch, method=objective)[0][0].mean())(params)

    loss, gradients = loss_and_gradients(params)
    np.testing.assert_allclose(loss, reference["loss"], rtol=1e-5)
    # The recorded gradients go through the same mapping as the weights. Tensors without a gradient, such as a bias
    # that is not a parameter, hold zeros or are not compared.
    forms = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in flat(params).items()}
    others = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in flat(state).items()}
    source = Safetensors(RECORDED / family / "gradients")
    expected = importing.load(found.family, found.model, source, found.model, forms, others)
    largest = max(float(np.abs(expected[path]).max()) for path in flat(gradients))
    for path, gradient in flat(gradients).items():
        wanted = np.asarray(expected[path])
        if np.abs(wanted).max() < NOTHING * largest:  # such as the bias of keys, which softmax ignores
            assert np.abs(gradient).max() < NOTHING * largest, path
            continue
        error = np.abs(np.asarray(gradient) - wanted).max() / np.abs(wanted).max()
        assert error < TOLERANCE, f"{path}: {error}"


def tensors(folder):
    with safe_open(folder / "model.safetensors", "numpy") as opened:
        return {name: opened.get_tensor(name) for name in sorted(opened.keys())}


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_of_exported_files(family, tmp_path, capsys):
    original = RECORDED / family
    assert convert([f"hf:{original}", str(tmp_path / "model")]) == 0
    assert export([str(tmp_path / "model"), str(tmp_path / "back")]) == 0
    theirs, ours = tensors(original), tensors(tmp_path / "back")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((original / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_live(family, tmp_path):
    """Loads the exported checkpoint in `transformers`, if it is installed."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    found, fn, params, state = loaded(family)
    save_model(tmp_path / "model", found.model, params, state)  # export writes a new config.json
    export([str(tmp_path / "model"), str(tmp_path / "back")])
    ids = np.load(RECORDED / family / "reference.npz")["ids"]
    chosen = {"attn_implementation": implementation(found.family.model_types[0])}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", **chosen).eval()
    original = transformers.AutoModelForCausalLM.from_pretrained(RECORDED / family, **chosen)
    for name, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor(ids), use_cache=False).logits.numpy()
    ours = jax.jit(lambda ids: fn(params, state, ids)[0][0])(jnp.asarray(ids, jnp.int32))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
