"""PEFT adapters: logits recorded with PEFT, engines, conversion, export, training, and what is refused."""

import builtins
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

import axcore as ax
import axcore_lora
from axcore.config import AxcoreError, ConfigError
from axcore.infer import Engine, Request, SamplingOptions
from axcore.module import abstract
from axcore.nn import Attention
from axcore.train import Learner, Trainer, WarmupStableDecay, save_model
from axcore.train.checkpoint.initial import initial_arrays
from axcore.train.checkpoint.model_folder import flat, like
from axcore.train.data import TextFiles, TextInput
from axcore_hf.checkpoint import Checkpoint
from axcore_hf.initial import FromHF
from axcore_lora import Adapter, LoRAAdapters
from axcore_lora.commands import adapter as adapter_command
from axcore_lora.layered import split
from axcore_lora.peft import CONFIG, TENSORS

HERE = pathlib.Path(__file__).parent / "peft"
BASES = pathlib.Path(__file__).parents[2] / "axcore-hf/tests/parity/recorded"
NAMES = sorted(each.name for each in HERE.iterdir())


def model_of(name):
    return Checkpoint.open(f"hf:{BASES / name}").model


def arrays_of(initial, model):
    """The function, the parameters and the other state of a model with initial weights."""
    fn, params, state = abstract(model)
    arrays = initial_arrays(initial, model, flat(params), flat(state), 0)
    return fn, like(params, arrays), like(state, arrays)


def base_of(name):
    return arrays_of(FromHF.Config(source=f"hf:{BASES / name}"), model_of(name))


def trainer(name):
    """A run that starts from a published model."""
    text = TextInput.Config(source=TextFiles.Config(folder="unread"), seq_len=8, batch_size=2)
    learner = Learner.Config(schedule=WarmupStableDecay(peak=0.1, warmup_steps=1))
    initial = FromHF.Config(source=f"hf:{BASES / name}")
    return Trainer.Config(model=model_of(name), input=text, learner=learner, steps=2, initial=initial)


def changes(adapter):
    """The change of each weight, by the name of its layer."""
    return {
        name: each.cfg.alpha / each.cfg.rank * np.matmul(each.arrays["a"], each.arrays["b"])
        for name, each in split(adapter).items()
    }


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, change in one.items():
        np.testing.assert_allclose(change, other[name], rtol=1e-5, atol=1e-5, err_msg=name)


def changed(folder, name="llama", tensors=lambda held: held, **fields):
    """A copy of a recorded adapter with other fields and tensors."""
    shutil.copytree(HERE / name, folder)
    raw = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**raw, **fields}))
    safetensors.numpy.save_file(tensors(safetensors.numpy.load_file(folder / TENSORS)), folder / TENSORS)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_starts_from_an_adapter_has_the_logits_of_peft(name):
    cfg = ax.pipe(trainer(name), ax.use("lora-weights", folder=str(HERE / name)))
    assert cfg.learner.rates == {"**": 0.0, "**.adapter.**": 1.0}
    fn, params, state = arrays_of(cfg.initial, cfg.model)
    reference = np.load(HERE / name / "reference.npz")
    logits = np.asarray(jax.jit(fn)(params, state, reference["ids"])[0][0])
    np.testing.assert_allclose(logits, reference["logits"], rtol=1e-4, atol=1e-4)
    assert np.abs(logits - reference["base"]).max() > 0.5


@pytest.mark.long
def test_an_engine_loads_an_adapter_of_peft():
    fn, params, state = base_of("llama")
    reference = np.load(HERE / "llama/reference.npz")
    cfg = Engine.Config(max_len=16, max_rows=2, step_tokens=32, adapters=LoRAAdapters.Config(max_rank=3))
    with cfg.build(fn.bind(params, state)) as engine:
        engine.load_adapter("p", HERE / "llama")
        for name, key in (("p", "logits"), (None, "base")):
            scores = engine.score([row.tolist() for row in reference["ids"]], adapter=name)
            expected = np.asarray(jax.nn.log_softmax(reference[key]))
            for row, ids, found in zip(expected, reference["ids"], scores, strict=True):
                wanted = row[np.arange(len(ids) - 1), ids[1:]]
                np.testing.assert_allclose([each.logprob for each in found], wanted, rtol=1e-4, atol=1e-4)
        request = Request((1, 2), SamplingOptions(max_tokens=1), adapter="p")
        assert len(engine.generate([request])[0].ids) == 1


@pytest.mark.long
def test_the_command_converts_from_and_to_peft(tmp_path):
    _, params, state = base_of("gpt2")
    base = str(save_model(tmp_path / "base", model_of("gpt2"), params, state))
    own, back = str(tmp_path / "own"), str(tmp_path / "back")
    assert adapter_command([str(HERE / "gpt2"), own, "--base", base]) == 0
    assert adapter_command([own, back, "--peft"]) == 0
    given = Adapter.read(HERE / "gpt2", model=model_of("gpt2"))
    assert_same(changes(given), changes(Adapter.read(own)))
    assert_same(changes(given), changes(Adapter.read(back, model=model_of("gpt2"))))
    with pytest.raises(AxcoreError, match=r"--base .* has no effect: .*own has the config of its model"):
        adapter_command([own, str(tmp_path / "no"), "--base", base])
    with pytest.raises(AxcoreError, match=r"nowhere is not a model folder"):
        adapter_command([str(tmp_path / "nowhere"), str(tmp_path / "no"), "--base", base])
    with pytest.raises(AxcoreError, match=r"no config of its model. Give that of the base model \(model=, or `axcore"):
        adapter_command([str(HERE / "gpt2"), str(tmp_path / "no")])


@pytest.mark.parametrize("name", ["phi3", pytest.param("gpt2", marks=pytest.mark.long)])
def test_adapters_that_differ_within_a_fused_module_are_exported(name, tmp_path):
    model = ax.pipe(
        model_of(name),
        ax.use("lora", rank=4, alpha=2.0, where="**.attention.*"),
        ax.use("lora", rank=2, where="**.attention.query"),
    )
    shapes = axcore_lora.adapters(abstract(model)[1])
    rng = np.random.default_rng(0)
    given = Adapter(model, jax.tree.map(lambda form: rng.normal(size=form.shape).astype(np.float32), shapes))
    found = Adapter.read(given.save_peft(tmp_path / "out"), model=model_of(name))
    assert_same(changes(given), changes(found))
    raw = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert raw["fan_in_fan_out"] == (name == "gpt2")
    assert {raw["r"], *raw["rank_pattern"].values()} == {10, 4}  # 2 + 4 + 4 of queries, keys and values


def test_a_rank_above_the_width_of_a_weight_keeps_the_change(tmp_path):
    rng, rank = np.random.default_rng(0), 40
    a, b = rng.normal(size=(rank, 16)).astype(np.float32), rng.normal(size=(8, rank)).astype(np.float32)
    name = "base_model.model.model.layers.1.self_attn.k_proj.lora_{}.weight"
    tensors = {name.format("A"): a, name.format("B"): b}
    folder = changed(tmp_path / "wide", tensors=lambda _: tensors, r=rank, lora_alpha=20, use_rslora=False)
    ((layer, change),) = changes(Adapter.read(folder, model=model_of("llama"))).items()
    assert layer == "decoder.1.attention.key"
    np.testing.assert_allclose(change, 0.5 * (b @ a).T, rtol=1e-5, atol=1e-4)


def renamed(old, new):
    return lambda held: {name.replace(old, new): each for name, each in held.items()}


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({"peft_type": "IA3"}, None, "peft_type='IA3' is not supported, only 'LORA'"),
        ({"use_dora": True}, None, "use_dora=True is not supported. Merge the adapter with PEFT"),
        ({"modules_to_save": ["lm_head"]}, None, "modules_to_save=['lm_head'] is not supported. The adapter also has"),
        ({"bias": "all"}, None, "bias='all' is not supported, only 'none'"),
        ({"lora_bias": True}, None, "lora_bias=True is not supported. Merge"),
        ({"init_lora_weights": "pissa"}, None, "changes the weights of the base model"),
        ({"layer_replication": [[0, 2]]}, None, "layer_replication=[[0, 2]] is not supported"),
        ({"a_new_field": 3}, None, "a_new_field=3 is not supported"),
        ({"r": 0}, None, "r=0 must be a positive number"),
        ({"lora_alpha": "8"}, None, "lora_alpha='8' must be a positive number"),
        ({"lora_alpha": 10**400}, None, "must be a positive number"),
        ({"lora_alpha": 1e300}, None, "lora_alpha=1e+300 must be a positive number"),
        ({"lora_dropout": "x"}, None, "lora_dropout='x' must be a number of at least 0 and below 1"),
        ({"lora_dropout": 1.5}, None, "lora_dropout=1.5 must be a number of at least 0 and below 1"),
        ({"rank_pattern": {"(": 2}}, None, "rank_pattern: '(' is not a regular expression (missing )"),
        ({"alpha_pattern": {"*": 2}}, None, "alpha_pattern: '*' is not a regular expression (nothing to repeat"),
        ({"r": 4}, None, " has rank 4 there, but 3 in adapter_model.safetensors"),
        ({}, renamed("q_proj", "qproj"), "model.layers.0.self_attn.qproj is not a module of Llama. Did you mean"),
        ({}, renamed("self_attn.q_proj", "input_layernorm"), "input_layernorm is not a module of Llama"),
        ({}, renamed("lm_head", "model.embed_tokens"), "model.embed_tokens is not a linear layer of its own"),
        ({}, renamed("lora_A", "lora_embedding_A"), "is of an embedding, not LoRA of a linear layer"),
        ({}, renamed("lora_A.weight", "lora_magnitude_vector"), "is of another kind, not LoRA of a linear layer"),
        ({}, lambda held: {k: v for k, v in held.items() if "lora_A" in k}, "has only one of lora_A and lora_B"),
        ({}, lambda _: {}, "has no tensors"),
        ({}, lambda held: {k: v * np.float32(np.nan) for k, v in held.items()}, "has values that are not finite"),
        ({}, lambda held: {k: v.astype(np.int32) for k, v in held.items()}, "has the dtype int32, expected floats"),
        ({}, lambda held: {**held, **renamed("base_model.model.", "")(held)}, "with and without 'base_model.model.'"),
        ({}, lambda held: {k: v[..., :2, :2].copy() for k, v in held.items()}, "expected [rank, 16] and [24, rank]"),
    ],
)  # fmt: skip
def test_case_what_is_not_plain_lora_of_the_model_is_refused(fields, tensors, message, tmp_path):
    folder = changed(tmp_path / "p", tensors=tensors or (lambda held: held), **fields)
    with pytest.raises(AxcoreError) as caught:
        Adapter.read(folder, model=model_of("llama"))
    assert message in str(caught.value) and str(folder) in str(caught.value)


def test_case_files_that_are_missing_or_damaged_are_refused(tmp_path):
    folder = changed(tmp_path / "p")
    (folder / TENSORS).write_bytes(b"x" * 20)
    with pytest.raises(AxcoreError, match="truncated or not a safetensors file"):
        Adapter.read(folder, model=model_of("llama"))
    (folder / TENSORS).unlink()
    with pytest.raises(AxcoreError, match=r"does not exist. Save the adapter with safe_serialization=True"):
        Adapter.read(folder, model=model_of("llama"))
    for text in ("{", "[" * 100_000):
        (folder / CONFIG).write_text(text)
        with pytest.raises(AxcoreError, match="Give a folder that PEFT has written"):
            Adapter.read(folder, model=model_of("llama"))


@pytest.mark.long
def test_case_models_that_no_adapter_of_peft_fits_are_refused(monkeypatch):
    llama = model_of("llama")
    with pytest.raises(ConfigError, match="already has an adapter"):
        Adapter.read(HERE / "llama", model=ax.use("lora")(llama))
    with pytest.raises(AxcoreError, match="known families computes what the model computes"):
        Adapter.read(HERE / "llama", model=ax.select(llama, Attention).set(softcap=3.0))
    with pytest.raises(AxcoreError, match="is not a module of Gemma"):
        Adapter.read(HERE / "gpt2", model=model_of("gemma"))
    with pytest.raises(ConfigError, match=r"initial is None, but adapters belong to the weights of a model"):
        ax.use("lora-weights", folder=str(HERE / "llama"))(trainer("llama").set(initial=None))

    original = builtins.__import__

    def without_hf(name, *args):
        if name == "axcore_hf":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_hf)
    with pytest.raises(
        AxcoreError, match=r"PEFT adapters require the names of published models. pip install axcore-hf"
    ):
        Adapter.read(HERE / "llama", model=llama)


def test_case_adapters_that_peft_cannot_have_are_not_exported(tmp_path):
    def exported(cfg):
        zeros = jax.tree.map(lambda form: np.zeros(form.shape, np.float32), axcore_lora.adapters(abstract(cfg)[1]))
        Adapter(cfg, zeros).save_peft(tmp_path / "no")

    with pytest.raises(AxcoreError, match="has a DoRA adapter, whose norms have another form in PEFT"):
        exported(ax.use("lora", dora=True)(model_of("llama")))
    with pytest.raises(AxcoreError, match=r"no linear module for the adapters of:\n  decoder\.0\.ffn\.experts\.down"):
        exported(ax.use("lora")(model_of("mixtral")))
    assert not (tmp_path / "no").exists()


@pytest.mark.long
def test_case_an_initial_whose_adapters_are_not_those_of_the_model_fails(tmp_path):
    cfg = ax.pipe(trainer("llama"), ax.use("lora-weights", folder=str(HERE / "llama")))
    narrow = ax.select(cfg, "**.query.adapter").set(rank=1)
    with pytest.raises(AxcoreError, match=r"query.adapter.a has the shape \(16, 3\) there and \(16, 1\) in the model"):
        arrays_of(narrow.initial, narrow.model)
