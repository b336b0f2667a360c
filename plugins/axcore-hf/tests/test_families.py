"""Published checkpoints: configs, alternative names and formats, and unsupported variants."""

import json
import math
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import axcore as ax
from axcore.module import abstract
from axcore.nn import layers_of
from axcore.train.checkpoint.initial import initial_arrays
from axcore.train.checkpoint.model_folder import flat
from axcore_hf.checkpoint import Checkpoint
from axcore_hf.commands import convert, export
from axcore_hf.families import family_of, language_part
from axcore_hf.fields import Fields
from axcore_hf.initial import FromHF
from axcore_hf.sources import Safetensors
from axcore_hf.transforms import MXFP4, Interleaved, Plain

PARITY = pathlib.Path(__file__).parent / "parity"
PUBLISHED = json.loads((PARITY / "published.json").read_text())


def model_of(raw):
    fields = Fields(raw)
    fields = language_part(fields) or fields
    return family_of(fields).read_config(fields)


def arrays_of(folder):
    found = Checkpoint.open(f"hf:{folder}")
    _, params, state = abstract(found.model)
    return initial_arrays(FromHF.Config(source=f"hf:{folder}"), found.model, flat(params), flat(state), 0)


@pytest.fixture
def copied(tmp_path):
    """(family, change of its tensors, change of its config) -> a folder with the changed checkpoint."""

    def copy(family, change, **fields):
        shutil.copytree(PARITY / "recorded" / family, tmp_path / family)
        file, config = tmp_path / family / "model.safetensors", tmp_path / family / "config.json"
        tensors = load_file(file)
        file.unlink()  # it may be read-only
        save_file(change(tensors), file)
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))
        return tmp_path / family

    return copy


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for path, array in theirs.items():
        np.testing.assert_array_equal(ours[path], array, err_msg=path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_the_published_parameter_count(name):
    params = flat(abstract(model_of(PUBLISHED[name]["config"]))[1])
    assert sum(math.prod(form.shape) for form in params.values()) == PUBLISHED[name]["parameters"]


def test_sliding_windows_are_in_the_configured_layers():
    def windowed(name, **fields):
        layers = layers_of(model_of(PUBLISHED[name]["config"] | fields).decoder)
        return ["SlidingWindow" in str(place.config.attention.mask) for place in layers]

    assert windowed("gemma-2-2b") == [True, False] * 13
    assert windowed("gemma-3-1b") == ([True] * 5 + [False]) * 4 + [True] * 2
    assert windowed("gpt-oss-20b") == [True, False] * 12
    assert not any(windowed("Qwen2.5-0.5B"))
    assert windowed("Qwen2.5-0.5B", use_sliding_window=True, max_window_layers=20) == [False] * 20 + [True] * 4


def test_old_gemma_3_configs_have_a_theta_per_layer_type():
    layers = layers_of(model_of(PUBLISHED["gemma-3-1b"]["config"]).decoder)
    assert [place.config.attention.position.theta for place in layers[:7]] == [1e4] * 5 + [1e6, 1e4]


def test_tensor_names_may_lack_the_prefix(copied):
    def bare(tensors):
        buffers = {"h.0.attn.bias": np.ones((1, 1, 32, 32), np.float32)}
        return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()} | buffers

    same(arrays_of(copied("gpt2", bare)), arrays_of(PARITY / "recorded/gpt2"))


def test_tied_embedding_may_be_stored_twice(copied):
    embedding = "model.embed_tokens.weight"
    folder = copied("smollm", lambda tensors: tensors | {"lm_head.weight": tensors[embedding].copy()})
    same(arrays_of(folder), arrays_of(PARITY / "recorded/smollm"))


def test_head_that_differs_from_a_tied_embedding_is_rejected(copied):
    embedding = "model.embed_tokens.weight"
    folder = copied("smollm", lambda tensors: tensors | {"lm_head.weight": tensors[embedding] + 1})
    with pytest.raises(ax.AxcoreError, match=r"tie_word_embeddings is true.*checkpoint differ"):
        arrays_of(folder)


def unpacked(transform, blocks, scales, shapes):
    """The result of a transform for all experts."""
    made = [np.full(shape, np.nan, np.float32) for shape in shapes]
    for number, index, part in transform.pieces({"b": blocks, "s": scales}.get, ("b", "s"), shapes):
        made[number][index] = part
    return made


@pytest.mark.parametrize("outer", ["language_model.model.", "model.language_model."])
def test_case_the_language_model_of_a_multimodal_model_is_read(tmp_path, outer, capsys):
    """With both naming schemes, a config that omits defaults, and the outer one of two `tie_word_embeddings`."""
    plain = PARITY / "recorded" / "gemma3"
    raw = json.loads((plain / "config.json").read_text())
    nested = {name: value for name, value in raw.items() if name != "rms_norm_eps"} | {"tie_word_embeddings": False}
    folder = tmp_path / "gemma3"
    folder.mkdir()
    config = {"model_type": "gemma3", "text_config": nested, "vision_config": {}, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name.replace("model.", outer, 1): array for name, array in load_file(plain / "model.safetensors").items()
    }
    seen = {"vision_tower.patch.weight": np.ones((2, 2), np.float32)}
    save_file({**tensors, **seen}, folder / "model.safetensors")
    same(arrays_of(folder), arrays_of(plain))
    convert([f"hf:{folder}", str(tmp_path / "out")])
    assert "converted only the language model, without vision_tower" in capsys.readouterr().err
    export([str(tmp_path / "out"), str(tmp_path / "back")])
    same(load_file(tmp_path / "back" / "model.safetensors"), load_file(plain / "model.safetensors"))


@pytest.mark.parametrize(
    ("name", "outer", "field", "alone", "within"),
    [
        ("granite", "llava_next", "logit_scale", 1 / 1.5, 1.0),
        ("gemma2", "llava", "softcap", 3.0, None),
        ("cohere2", "aya_vision", "logit_scale", 0.25, 1.0),
        ("cohere2", "cohere2_vision", "logit_scale", 0.25, 1.0),
    ],
)
def test_case_a_multimodal_model_does_not_change_the_logits_of_its_head(name, outer, field, alone, within):
    """As in `transformers`, whose multimodal classes have a head of their own: in a LlavaNextForConditionalGeneration,
    the logits of the recorded granite checkpoint are 1.5 times those of a GraniteForCausalLM."""
    nested = json.loads((PARITY / "recorded" / name / "config.json").read_text())
    assert getattr(model_of(nested), field) == alone
    assert getattr(model_of({"model_type": outer, "text_config": nested}), field) == within


def test_an_unknown_language_model_is_rejected():
    raw = {"model_type": "some_vlm", "text_config": {"model_type": "some_text"}}
    with pytest.raises(ax.ConfigError, match=r"model_type='some_vlm' is not supported"):
        model_of(raw)


def test_mxfp4_matches_transformers():
    recorded = np.load(PARITY / "recorded/mxfp4.npz")
    blocks, scales, wide = recorded["blocks"], recorded["scales"], recorded["wide"]
    shape = wide.shape
    np.testing.assert_array_equal(unpacked(MXFP4(Plain()), blocks, scales, [shape]), [wide])
    gate_up = unpacked(MXFP4(Interleaved()), blocks, scales, [(*shape[:2], shape[2] // 2)] * 2)
    np.testing.assert_array_equal(gate_up, [wide[..., ::2], wide[..., 1::2]])
    assert MXFP4(Plain()).expected([shape]) == [blocks.shape, scales.shape]


def test_mxfp4_experts_are_loaded(copied):
    rng = np.random.default_rng(0)
    wider = {16: 32, 24: 64, 48: 128}  # the recorded model is narrower than a block of 32 numbers

    def packed(tensors):
        made = {}
        for name, tensor in tensors.items():
            shape = [wider.get(size, size) for size in tensor.shape]
            if name.endswith(("gate_up_proj", "down_proj")):
                experts, width, out = shape
                made[f"{name}_blocks"] = rng.integers(0, 256, (experts, out, width // 32, 16), np.uint8)
                made[f"{name}_scales"] = rng.integers(120, 130, (experts, out, width // 32), np.uint8)
            else:
                made[name] = rng.normal(size=shape).astype(np.float32)
        return made

    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    folder = copied("gpt_oss", packed, hidden_size=32, intermediate_size=64, num_key_value_heads=4, **quantized)
    arrays, tensors = arrays_of(folder), load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    (down,) = (array for path, array in arrays.items() if path.endswith("layers.1.ffn.experts.down.weight"))
    expected = unpacked(MXFP4(Plain()), tensors[f"{name}_blocks"], tensors[f"{name}_scales"], [down.shape[-3:]])
    np.testing.assert_array_equal(down.reshape(down.shape[-3:]), expected[0])


def test_float8_weights_are_multiplied_by_their_block_scales(tmp_path):
    import ml_dtypes

    rng = np.random.default_rng(0)
    weight = rng.normal(size=(130, 300)).astype(ml_dtypes.float8_e4m3fn)
    factors = rng.uniform(0.5, 2, (2, 3)).astype(np.float32)
    header, data = {}, b""
    for name, kind, array in (("w.weight", "F8_E4M3", weight), ("w.weight_scale_inv", "F32", factors)):
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    head = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    found = Safetensors(tmp_path).read("w.weight")
    expected = np.array(
        [[float(weight[i, j]) * float(factors[i // 128, j // 128]) for j in range(300)] for i in range(130)]
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


LLAMA = PUBLISHED["Llama-3.1-8B"]["config"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "lama"}, r"model_type='lama' is not supported.*Did you mean 'llama'"),
        ({"model_type": "dbrx", "logit_scale": 0.06}, r"the family llama does not have: logit_scale=0\.06\. Its"),
        (
            {"model_type": "persimmon", "partial_rotary_factor": 0.5},
            r"the family llama ignores: partial_rotary_factor=0\.5\. Its",
        ),
        ({"hidden_act": "quick_gelu"}, r"hidden_act='quick_gelu' is not supported\. Known: .*'silu'"),
        ({"residual_multiplier": 0.22}, r"not supported for model_type 'llama': residual_multiplier=0.22"),
        ({"rope_scaling": {"rope_type": "yarm", "factor": 4.0}}, r"rope_type='yarm' is not supported.*'yarn'"),
        ({"num_hidden_layers": None}, r"num_hidden_layers=None must be a positive whole number"),
        ({"num_attention_heads": 0}, r"num_attention_heads=0 must be a positive whole number"),
        ({"num_key_value_heads": "8"}, r"num_key_value_heads='8' must be a positive whole number"),
        ({"hidden_size": 4096.0}, r"hidden_size=4096\.0 must be a positive whole number"),
        ({"tie_word_embeddings": "false"}, r"tie_word_embeddings='false' must be true or false"),
        ({"rms_norm_eps": math.nan}, r"rms_norm_eps=nan must be a positive number"),
        ({"rope_theta": True}, r"rope_theta=True must be a positive number"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"rope_type='yarn' requires factor"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": None}},
            r"original_max_position_embeddings of rope_type='yarn' must not be null",
        ),
        ({"rope_scaling": "linear"}, r"rope_scaling='linear' must be an object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, r"Linear\.factor must be float, not '2'"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": math.inf}},
            r"Linear\.factor must be finite and above 0, not inf",
        ),
    ],
)
def test_unsupported_config_values_are_rejected(fields, message):
    with pytest.raises(ax.ConfigError, match=message):
        model_of(LLAMA | fields)


def test_an_unknown_layer_type_is_rejected():
    raw = PUBLISHED["gpt-oss-20b"]["config"]
    with pytest.raises(ax.ConfigError, match=r"layer_types has 'chunked_attention', which is not supported\. Known"):
        model_of(raw | {"layer_types": ["chunked_attention", *raw["layer_types"][1:]]})


def test_fields_by_layer_must_cover_all_layers():
    raw = PUBLISHED["gpt-oss-20b"]["config"]
    with pytest.raises(ax.ConfigError, match=r"config\.json: layer_types lists 23 layers, but the model has 24"):
        model_of(raw | {"layer_types": raw["layer_types"][1:]})
    by_kind = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    with pytest.raises(ax.ConfigError, match=r"config\.json: rope_parameters differ between layer types"):
        model_of(LLAMA | {"rope_parameters": by_kind, "rope_scaling": None})


def test_truncate_of_yarn_is_rejected_inside_the_entry_of_a_layer_type():
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096}
    raw = PUBLISHED["gemma-3-1b"]["config"]
    model_of(raw | {"rope_parameters": {"full_attention": yarn}})
    with pytest.raises(ax.ConfigError, match="truncate=False in rope_parameters is not supported"):
        model_of(raw | {"rope_parameters": {"full_attention": yarn | {"truncate": False}}})


def test_quantized_weights_of_other_families_are_rejected():
    with pytest.raises(
        ax.ConfigError, match=r"quantization_config=.* is not supported for model_type 'llama'\. Known: None"
    ):
        model_of(LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
