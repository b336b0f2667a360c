"""The chat template and the special tokens next to a tokenizer."""

import json

import pytest

from axcore.config import AxcoreError
from axcore.train.data import ByteTokenizer
from axcore_hf.byte_level import byte_level_files
from axcore_hf.feature import PublishedTokenizer
from axcore_hf.tokenizer import HFTokenizer, read_files

NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]


@pytest.fixture
def built(tmp_path):
    """Builds a tokenizer beside other files, whose contents are given by name."""

    def build(**files):
        (tmp_path / "tokenizer.json").write_bytes(byte_level_files()["tokenizer.json"])
        for name, content in files.items():
            file = {"described": "tokenizer_config.json", "template": "chat_template.jinja"}[name]
            (tmp_path / file).write_text(content if isinstance(content, str) else json.dumps(content))
        return HFTokenizer.Config(file=str(tmp_path / "tokenizer.json"), eos_ids=(256,)).build()

    return build


@pytest.mark.parametrize(
    ("files", "template", "special"),
    [
        ({}, None, {}),
        ({"described": {"chat_template": "own", "bos_token": "<s>"}}, "own", {"bos_token": "<s>"}),
        ({"described": {"eos_token": {"content": "</s>", "lstrip": False}}}, None, {"eos_token": "</s>"}),
        ({"described": {"chat_template": NAMED, "pad_token": None, "add_bos_token": True}}, "plain", {}),
        ({"described": {"chat_template": "old"}, "template": "new\n"}, "new\n", {}),
    ],
)
def test_case_templates_are_read_from_published_files(built, files, template, special):
    tokenizer = built(**files)
    assert (tokenizer.chat_template, dict(tokenizer.special_tokens)) == (template, special)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_case_a_damaged_description_is_named(built, content):
    with pytest.raises(AxcoreError, match=r"tokenizer_config\.json is not a JSON object"):
        built(described=content)


def test_the_tokenizer_of_a_checkpoint_has_its_template(built, tmp_path, monkeypatch):
    built(template="text", described={"bos_token": "<s>"})
    packed = HFTokenizer.Config(file="tokenizer.json", eos_ids=(256,)), read_files(tmp_path)
    monkeypatch.setattr(PublishedTokenizer.Config, "packed", lambda _: packed)
    tokenizer = PublishedTokenizer.Config(source="hf:somewhere").build()
    assert (tokenizer.chat_template, tokenizer.special_tokens) == ("text", {"bos_token": "<s>"})


def test_special_tokens_in_a_prompt_are_tokens(built):
    """Templates write them as text."""
    assert built().encode(b"a<|endoftext|>b").tolist() == [97, 256, 98]


def test_the_template_travels_with_the_tokenizer(built, tmp_path):
    built(template="text")
    assert read_files(tmp_path)["chat_template.jinja"] == b"text"
    assert ByteTokenizer.Config().build().chat_template is None
