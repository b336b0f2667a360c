"""Export to other dtypes, of changed models, of runs and of quantized models."""

import json
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import axcore as ax
from axcore.config import AxcoreError
from axcore.module import abstract
from axcore.nn import Attention, Causal, CausalLM, FeedForward, Repeat, TransformerLayer, use_kernels
from axcore.plugin import Command, registry, resolve
from axcore.train import ModelFolder, Trainer, save_model
from axcore.train.checkpoint.initial import initial_arrays
from axcore.train.checkpoint.model_folder import flat
from axcore.train.data import ByteTokenizer, TextFiles, TextInput
from axcore_hf import describing
from axcore_hf.agreement import compared, differences
from axcore_hf.checkpoint import Checkpoint
from axcore_hf.commands import PUBLISHED, _description, convert, export
from axcore_hf.families import family_of
from axcore_hf.fields import Fields
from axcore_hf.initial import FromHF
from axcore_hf.tokenizer import HFTokenizer
from axcore_moe.balance import LoadBalance
from axcore_moe.dispatch import Capacity, Dense
from axcore_moe.exchange import Exchange
from axcore_moe.layer import MoE
from axcore_moe.router import TopK
from axcore_rope.rotary import Rotary
from axcore_rope.scaling import DynamicNTK

from .parity.test_parity import RECORDED, tensors
from .test_checkpoints import vocabulary


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


def test_case_float32_noise_is_not_a_difference(model, tmp_path):
    raw = json.loads((model / PUBLISHED).read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**raw, "rms_norm_eps": float(np.float32(raw["rms_norm_eps"]))}))
    export([str(model), str(tmp_path / "out"), "--config", str(other)])


def test_case_differing_options_are_refused_unless_forced(model, tmp_path):
    raw = json.loads((model / PUBLISHED).read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**raw, "rms_norm_eps": 0.5}))
    with pytest.raises(AxcoreError) as caught:
        export([str(model), str(tmp_path / "changed"), "--config", str(other)])
    message = str(caught.value)
    assert "with other outputs:\n  model.norm.eps: the model has 1e-06, config.json describes 0.5\n" in message
    assert "  model.decoder.layers.attention_norm.eps (layers 0, 1): the model has 1e-06, config.json" in message
    assert not (tmp_path / "changed").exists()
    export([str(model), str(tmp_path / "changed"), "--config", str(other), "--force"])
    assert described(tmp_path / "changed")["rms_norm_eps"] == 0.5


def test_differing_shapes_are_rejected(model, tmp_path):
    raw = json.loads((model / PUBLISHED).read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**raw, "intermediate_size": 7}))
    with pytest.raises(AxcoreError, match=r"other\.json describes a different model:\n  parameter decoder\.0\.ffn\."):
        export([str(model), str(tmp_path / "out"), "--config", str(other), "--force"])
    assert not (tmp_path / "out").exists()


def test_shard_size_must_be_positive(model, tmp_path):
    with pytest.raises(AxcoreError, match="--shard-gib must be positive, not 0"):
        export([str(model), str(tmp_path / "out"), "--shard-gib", "0"])


def family_model(name):
    fields = Fields(json.loads((RECORDED / name / "config.json").read_text()))
    return family_of(fields).read_config(fields)


def edit(where, **values):
    return lambda cfg: ax.select(cfg, where).set(**values)


OTHERWISE = {
    "selection bias": ("router.bias_rate", "a selection bias", "None", edit(TopK, bias_rate=0.001)),
    "capacity": ("ffn.dispatch", "Capacity", "every token reaches", edit(MoE, dispatch=Capacity())),
    "lossy exchange": ("ffn.dispatch", "Exchange", "every token", edit(MoE, dispatch=Exchange(dropless=False))),
    "top k": ("router.top_k", "1", "2", edit(TopK, top_k=1)),
    "theta": ("attention.position.theta", "5000.0", "10000.0", edit(Rotary, theta=5000.0)),
    "no position": ("attention.position", "None", "Rotary(", edit(Attention, position=None)),
    "softcap": ("softcap", "20.0", "None", edit("", softcap=20.0)),
    "attention softcap": ("attention.softcap", "20.0", "None", edit(Attention, softcap=20.0)),
    "scale": ("attention.scale", "0.25", "0.353", edit(Attention, scale=0.25)),
    "embedding scale": ("embedding.scale", "4.0", "1.0", edit("embedding", scale=4.0)),
    "alibi": ("attention.bias", "Alibi(", "None", ax.use("alibi")),
    "window": ("attention.mask", "Causal() & SlidingWindow(", "Causal()", ax.use("sliding-window", size=7)),
    "activation": ("experts.block.activation", "gelu", "silu", edit(FeedForward, activation=jax.nn.gelu)),
}
THE_SAME = {
    "losses": edit(MoE, balance=LoadBalance(weight=0.1), z_loss=0.1, dead_expert_steps=3),
    "dense dispatch": edit(MoE, dispatch=Dense()),
    "dropout": edit(TransformerLayer, dropout=0.1),
    "jitter": edit(TopK, jitter=0.1),
    "kernel": lambda cfg: use_kernels(cfg, ("reference",)),
    "bfloat16": edit("", dtypes=ax.DTypes(compute="bfloat16")),
    "scale": edit(Attention, scale=8**-0.5),
    "windows for packing": edit(Attention, mask=Causal()),
    "padding": edit("", pad_vocab_to=128),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_case_export_names_what_computes_otherwise(name):
    published = family_model("qwen3_moe")
    path, ours, theirs, change = OTHERWISE[name]
    expected = rf"model\.(decoder\.layers\..*)?{path}(?: \(layers [-\d, ]+\))?: the model has .*"
    expected += rf"{re.escape(ours)}.*, config\.json describes .*{re.escape(theirs)}"
    lines = differences(published, change(published))
    assert any(re.fullmatch(expected + ".*", line) for line in lines), lines


@pytest.mark.parametrize("name", THE_SAME)
def test_options_without_effect_are_no_difference(name):
    published = family_model("qwen3_moe")
    assert not differences(published, THE_SAME[name](published))


@pytest.mark.long
def test_case_bfloat16_export_keeps_selection_biases_in_float32(tmp_path):
    name, file = "e_score_correction_bias", tmp_path / "source" / "model.safetensors"
    shutil.copytree(RECORDED / "deepseek_v3", tmp_path / "source", ignore=shutil.ignore_patterns("gradients", "*.npz"))
    held = tensors(tmp_path / "source")
    for each in (each for each in held if name in each):
        held[each] = 1 + 1e-3 * np.arange(held[each].size, dtype=np.float32)
    file.unlink()
    safetensors.numpy.save_file(held, file)
    convert([f"hf:{tmp_path / 'source'}", str(tmp_path / "model")])
    export([str(tmp_path / "model"), str(tmp_path / "out"), "--dtype", "bfloat16"])
    out = tensors(tmp_path / "out")
    biases = [each for each in out if name in each]
    assert biases and all(out[each].dtype == np.float32 for each in biases)
    for each in biases:
        np.testing.assert_array_equal(out[each], held[each])
    assert out["model.norm.weight"].dtype == ml_dtypes.bfloat16


def test_case_the_tokenizer_option_is_checked_and_written(model, tmp_path):
    with pytest.raises(AxcoreError, match="No such file"):
        export([str(model), str(tmp_path / "out"), "--tokenizer", str(tmp_path / "none.json")])
    with pytest.raises(AxcoreError, match="has 65 ids, but the model has vocab_size=64"):
        export([str(model), str(tmp_path / "out"), "--tokenizer", str(vocabulary(tmp_path, 65))])
    assert not (tmp_path / "out").exists()
    (model / "tokenizer_config.json").write_text("{}")  # of the replaced tokenizer
    file = vocabulary(tmp_path, 60)
    export([str(model), str(tmp_path / "out"), "--tokenizer", str(file)])
    assert (tmp_path / "out/tokenizer.json").read_bytes() == file.read_bytes()
    assert not (tmp_path / "out/tokenizer_config.json").exists()


def test_case_the_tokenizer_of_a_run_is_found_by_a_relative_path(tmp_path, monkeypatch):
    (tmp_path / "words").mkdir()
    file = vocabulary(tmp_path / "words", 60)
    monkeypatch.chdir(tmp_path)
    in_run = HFTokenizer.Config(file="words/tokenizer.json").inside(tmp_path / "run")
    assert in_run.packed()[1] == {"tokenizer.json": file.read_bytes()} and in_run.build().vocab_size == 60
    in_folder = HFTokenizer.Config(file="tokenizer.json").inside(tmp_path / "words")
    assert in_folder.file == str(file)
    monkeypatch.chdir(tmp_path / "words")
    assert HFTokenizer.Config(file="tokenizer.json").inside(tmp_path / "run").file == str(file)


NEW = (
    *("exaone4", "gemma", "glm4", "gpt_neox", "granite", "olmo3", "olmoe", "phi", "qwen2_moe", "smollm3"),
    "starcoder2",
)


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3", "gpt2", "qwen2", *NEW])
def test_case_a_written_config_describes_the_same_model(name):
    published = family_model(name)
    found = compared(
        family_of(Fields(made := describing.described(published, 64))).read_config(Fields(made)), published
    )
    assert not found.shapes and not found.options
    raw = json.loads((RECORDED / name / "config.json").read_text())
    assert (made["model_type"], made["architectures"]) == (raw["model_type"], raw["architectures"])


def test_case_a_written_config_has_the_length_that_its_rope_depends_on():
    dynamic = ax.select(family_model("llama"), Rotary).set(scaling=DynamicNTK(factor=4.0, original_max=16))
    assert describing.described(dynamic, 128)["max_position_embeddings"] == 16
    assert describing.described(family_model("phi3"), 128)["max_position_embeddings"] == 64


@pytest.mark.parametrize(("name", "field"), [("gpt_neox", "rotary_pct"), ("phi", "partial_rotary_factor")])
def test_case_a_written_config_says_that_whole_heads_are_rotated_if_that_is_not_the_default(name, field):
    whole = ax.select(family_model(name), Rotary).set(rotary_dim=None)
    assert describing.described(whole, 64)[field] == 1.0


def run_of(**fields):
    """A trainer's config of a small model."""
    layer = TransformerLayer.Config(attention=Attention.Config(num_heads=2), ffn=FeedForward.Config(hidden_dim=24))
    model = CausalLM.Config(vocab_size=264, dim=16, decoder=Repeat.Config(num_layers=2, layers=layer), **fields)
    source = TextInput.Config(
        source=TextFiles.Config(folder="."), tokenizer=ByteTokenizer.Config(), seq_len=32, batch_size=1
    )
    return Trainer.Config(model=ax.pipe(model, ax.use("rope")), input=source, steps=1)


def test_case_a_run_that_was_never_converted_is_exported_with_its_config_and_tokenizer(tmp_path):
    cfg, random = run_of(pad_vocab_to=128), np.random.default_rng(0)
    forms = abstract(cfg.model)[1]
    params = jax.tree.map(lambda form: random.normal(size=form.shape).astype(np.float32), forms)
    save_model(tmp_path / "run", cfg, params)
    export([str(tmp_path / "run"), str(tmp_path / "out")])
    raw = described(tmp_path / "out")
    assert (raw["model_type"], raw["max_position_embeddings"], raw["eos_token_id"]) == ("llama", 32, 256)
    assert tensors(tmp_path / "out")["lm_head.weight"].shape == (264, 16)
    source = f"hf:{tmp_path / 'out'}"
    found = Checkpoint.open(source)
    assert not differences(found.model, cfg.model)
    arrays = initial_arrays(FromHF.Config(source=source), cfg.model, flat(forms), {}, 0)
    for path, array in flat(params).items():
        rows = {"embedding.weight": np.s_[:264], "head.weight": np.s_[:, :264]}.get(path, ...)
        np.testing.assert_array_equal(arrays[path][rows], array[rows], err_msg=path)
    text, bytes_ = "Grüße, 42!\n".encode(), ByteTokenizer.Config().build()
    tokenizer = found.tokenizer.set(file=str(tmp_path / "out/tokenizer.json")).build()
    np.testing.assert_array_equal(tokenizer.prompt(text), bytes_.prompt(text))
    assert tokenizer.decode(bytes_.prompt(text)) == text and tokenizer.eos_ids == bytes_.eos_ids


@pytest.mark.long
def test_case_a_run_with_number_formats_is_exported_with_its_float_weights(tmp_path, capfd):
    cfg = run_of().model
    _, params, _ = ax.functional(cfg.build(rngs=ax.Rngs(0)))
    save_model(tmp_path / "plain", cfg, params)
    export([str(tmp_path / "plain"), str(tmp_path / "expected")])
    assert "number formats" not in capfd.readouterr().err
    for name, options in {"fp8": {"scaling": "delayed"}, "int8": {}}.items():
        rounded = ax.use(name, where="decoder.**", **options)(cfg)
        _, params, state = ax.functional(rounded.build(rngs=ax.Rngs(0)))
        save_model(tmp_path / name, rounded, params, state)
        export([str(tmp_path / name), str(tmp_path / f"{name} out")])
        assert "left out the number formats of training" in capfd.readouterr().err
        assert described(tmp_path / f"{name} out") == described(tmp_path / "expected")
        for each, tensor in tensors(tmp_path / "expected").items():
            np.testing.assert_array_equal(tensors(tmp_path / f"{name} out")[each], tensor, err_msg=each)


def test_case_a_model_without_a_published_counterpart_is_refused_by_name():
    with pytest.raises(AxcoreError) as refused:
        describing.described(run_of(softcap=5.0).model)
    message = str(refused.value)
    assert re.match(r"none of the \d+ known families computes what the model computes, .* nearest, llama, dif", message)
    assert "\n  model.softcap: the model has 5.0, config.json describes None\n" in message
    assert "another model: --config FILE --force\n" in message and "Adding a family" in message


def test_case_export_of_quickstart_names_what_no_family_has():
    with pytest.raises(AxcoreError) as refused:
        describing.described(ax.recipe("quickstart").model)
    where = r"  model\.decoder\.layers{} \(layers 0-2\): the model has {}, config\.json describes {}\n"
    for parts in (
        ("", r".*\.ConvTransformerLayer", r".*\.TransformerLayer"),
        (r"\.ffn\.gate", "None", r"Linear\(\)"),
        (r"\.conv", r"ShortConv\(\)", "None"),
    ):
        assert re.search(where.format(*parts), str(refused.value)), str(refused.value)
    assert "--force" not in str(refused.value)  # no config.json has its tensors


@pytest.fixture
def adapted(tmp_path):
    """A model folder with LoRA adapters, whose tokenizer is elsewhere."""
    cfg = ax.pipe(run_of().model, ax.use("lora", where="**.query"))
    params = jax.tree.map(lambda form: np.ones(form.shape, np.float32), abstract(cfg)[1])
    tokenizer = HFTokenizer.Config(file=str(vocabulary(tmp_path, 60)), eos_ids=(1,))
    return save_model(tmp_path / "run", cfg, params, tokenizer=tokenizer)


def test_case_a_merged_model_that_is_moved_has_its_tokenizer(adapted, tmp_path):
    command, offer = registry().find(Command, "merge")
    resolve(command, offer)([str(adapted), str(tmp_path / "merged")])
    written = (tmp_path / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").unlink()
    found = ModelFolder.open((tmp_path / "merged").rename(tmp_path / "moved"))
    expected = HFTokenizer.Config(file=str(tmp_path / "moved/tokenizer.json"), eos_ids=(1,))
    assert found.tokenizer == expected and found.tokenizer.build().vocab_size == 60
    assert found.tokenizer.packed()[1]["tokenizer.json"] == written


def test_case_export_of_adapters_names_axcore_merge(adapted, tmp_path):
    with pytest.raises(AxcoreError) as refused:
        export([str(tmp_path / "run"), str(tmp_path / "out")])
    expected = f"model.decoder.layers.attention.query.adapter is axcore_lora.layer.LoRA, but .*axcore merge {adapted} "
    assert re.search(expected, str(refused.value))


def test_case_a_fine_tuned_run_has_the_config_of_its_weights_or_its_own(tmp_path):
    source = f"hf:{RECORDED / 'llama'}"
    published = json.loads((RECORDED / "llama/config.json").read_text())
    run = run_of().set(initial=FromHF.Config(source=source), model=family_model("llama"))
    raw, where = _description(ModelFolder(tmp_path, run, None), run.model, None)
    assert (raw, where) == (published, source)
    model = ax.select(run.model, Rotary).set(theta=5000.0)
    raw, where = _description(ModelFolder(tmp_path, run.set(model=model), None), model, None)
    assert (raw["rope_parameters"]["rope_theta"], where) == (5000.0, str(tmp_path))


def test_case_weights_are_loaded_into_a_padded_vocabulary(tmp_path):
    source = f"hf:{RECORDED / 'llama'}"
    model = family_model("llama").set(pad_vocab_to=48)
    _, params, state = abstract(model)
    arrays = initial_arrays(FromHF.Config(source=source), model, flat(params), flat(state), 0)
    published = tensors(RECORDED / "llama")["model.embed_tokens.weight"]
    assert arrays["embedding.weight"].shape == (96, 16)
    np.testing.assert_array_equal(arrays["embedding.weight"][:64], published)
    assert not np.asarray(arrays["embedding.weight"][64:]).any()
