"""GGUF files, written with llama.cpp's library: a small Llama round-trips, and unsupported files are rejected."""

import json

import gguf
import numpy as np
import pytest

from axcore.config import AxcoreError
from axcore.module import abstract
from axcore.train import ModelFolder
from axcore.train.checkpoint.model_folder import flat
from axcore_hf import importing
from axcore_hf.checkpoint import Checkpoint
from axcore_hf.commands import convert, export

from .parity.test_parity import RECORDED, tensors

ORIGINAL = RECORDED / "llama"
RAW = json.loads((ORIGINAL / "config.json").read_text())
HEADS, KV_HEADS = RAW["num_attention_heads"], RAW["num_key_value_heads"]
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
TOKENS = ["<|end|>", *(chr(number) for number in range(ord("a"), ord("z") + 1)), "Ġ", "1", "2", "ab", "Ġab", "12"]


def permuted(weight, heads):
    """Orders rows like llama.cpp: row i of a head's first half becomes row 2i, row i of its second half 2i + 1."""
    made = np.empty_like(weight)
    size = len(weight) // heads
    for row in range(len(weight)):
        head, within = divmod(row, size)
        made[head * size + (2 * within if within < size // 2 else 2 * within - size + 1)] = weight[row]
    return made


def write(file, tokenizer=False, pre="smollm", more=(), tensors_more=()):
    """The recorded Llama as a GGUF file."""
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(RAW["num_hidden_layers"])
    writer.add_context_length(RAW["max_position_embeddings"])
    writer.add_embedding_length(RAW["hidden_size"])
    writer.add_feed_forward_length(RAW["intermediate_size"])
    writer.add_vocab_size(RAW["vocab_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(RAW["rms_norm_eps"])
    writer.add_rope_freq_base(RAW["rope_parameters"]["rope_theta"])
    for name, value in more:
        writer.add_float32(f"llama.{name}", value)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, *[1] * (len(TOKENS) - 1)])
        writer.add_token_merges(["a b", "Ġ ab", "1 2"])
        writer.add_eos_token_id(0)
    for name, tensor in [*tensors(ORIGINAL).items(), *tensors_more]:
        if "q_proj" in name or "k_proj" in name:
            tensor = permuted(tensor, HEADS if "q_proj" in name else KV_HEADS)
        name = name.replace("model.layers", "blk")
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_gguf_file_matches_its_original_checkpoint(tmp_path):
    ours = Checkpoint.open(f"gguf:{write(tmp_path / 'tiny.gguf')}")
    theirs = Checkpoint.open(f"hf:{ORIGINAL}")
    assert ours.tokenizer is None
    forms = flat(abstract(theirs.model)[1])
    loaded, expected = (importing.load(x.family, x.model, x.source, theirs.model, forms, {}) for x in (ours, theirs))
    assert loaded.keys() == expected.keys() == forms.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(loaded[path], array, err_msg=path)
    for name in ("num_heads", "num_kv_heads", "head_dim", "position", "mask"):
        mine, other = (x.model.decoder.layers.attention for x in (ours, theirs))
        assert getattr(mine, name) == getattr(other, name)


def test_converted_gguf_exports_to_the_original_tensors(tmp_path):
    file = write(tmp_path / "tiny.gguf", tokenizer=True)
    convert([f"gguf:{file}", str(tmp_path / "model")])
    export([str(tmp_path / "model"), str(tmp_path / "back")])
    theirs, back = tensors(ORIGINAL), tensors(tmp_path / "back")
    assert back.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(back[name], tensor, err_msg=name)
    assert (tmp_path / "back/tokenizer.json").exists()
    assert ModelFolder.open(tmp_path / "model").tokenizer.build().eos_ids == (0,)


@pytest.mark.parametrize(("pre", "expected"), [("smollm", ["1", "2"]), ("gpt-2", ["12"])])
def test_tokenizer_is_built_from_the_metadata(tmp_path, pre, expected):
    file = write(tmp_path / "tiny.gguf", tokenizer=True, pre=pre)
    convert([f"gguf:{file}", str(tmp_path / "model")])
    tokenizer = ModelFolder.open(tmp_path / "model").tokenizer.build()
    words = [TOKENS[number] for number in tokenizer.encode(b"ab ab12<|end|>")]
    assert words == ["ab", "Ġab", *expected, "<|end|>"]
    assert tokenizer.decode(tokenizer.encode(b"ab ab12")) == b"ab ab12"


def test_unsupported_metadata_is_rejected(tmp_path):
    def opened(**more):
        return Checkpoint.open(f"gguf:{write(tmp_path / 'tiny.gguf', **more)}")

    with pytest.raises(AxcoreError, match=r"not supported: residual_scale=0\.5"):
        opened(more=[("residual_scale", 0.5)])
    with pytest.raises(AxcoreError, match=r"scales the frequencies of RoPE \(rope_freqs\.weight\)"):
        opened(tensors_more=[("rope_freqs.weight", np.ones(4, np.float32))])
    with pytest.raises(AxcoreError, match=r"tokenizer\.ggml\.pre='other' is not supported\. Known: smollm, gpt-2"):
        opened(tokenizer=True, pre="other")


def test_damaged_files_and_unknown_architectures_are_reported(tmp_path):
    content = write(tmp_path / "tiny.gguf").read_bytes()
    for kept in (3, 60, len(content) // 2, len(content) - 40):
        (tmp_path / "cut.gguf").write_bytes(content[:kept])
        with pytest.raises(AxcoreError, match=r"cut\.gguf is truncated or not a GGUF file"):
            Checkpoint.open(f"gguf:{tmp_path / 'cut.gguf'}")
    gguf_other = gguf.GGUFWriter(str(tmp_path / "other.gguf"), "mamba")
    gguf_other.write_header_to_file()
    gguf_other.write_kv_data_to_file()
    gguf_other.write_tensors_to_file()
    gguf_other.close()
    with pytest.raises(AxcoreError, match=r"the architecture 'mamba' is not supported\. Known: llama"):
        Checkpoint.open(f"gguf:{tmp_path / 'other.gguf'}")
