"""Bytes and streams of the kinds of tokenizers that published models use."""

import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from axcore.infer.text import TextStream
from axcore_hf.byte_level import characters
from axcore_hf.token_bytes import bytes_decoder
from axcore_hf.tokenizer import HFTokenizer

WORDS = ["a", "b", "ab", "▁", "▁a", "▁ab", "▁▁", "é", "▁日", "本", "."]
ADDED = [
    AddedToken("<end>", special=True),
    AddedToken("<think>", special=False),
    AddedToken("two words", special=False),
]


def vocabulary(tokens):
    return {token: id for id, token in enumerate(tokens)}


def byte_level():
    tokens = [*characters(), *("".join(characters()[byte] for byte in "日本 a".encode()[:n]) for n in (2, 4, 7))]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary(tokens), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback():
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary(tokens), [], unk_token="<unk>", byte_fallback=True))
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(list(steps))
    return tokenizer


def metaspace():
    tokenizer = tokenizers.Tokenizer(models.Unigram([(word, -1.0) for word in WORDS], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece():
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary(["[UNK]", "a", "##b", ".", "##é", "n't", "日"])))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


KINDS = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "metaspace": metaspace,
    "word piece": word_piece,
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """The tokenizer of the library, and axcore's."""
    built = KINDS[request.param]()
    built.add_tokens(ADDED)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    built.save(str(file))
    return built, HFTokenizer.Config(file=str(file)).build()


def ids_of(data, tokenizer):
    return data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))


@settings(max_examples=100)
@given(st.data())
def test_pieces_join_to_the_whole_text(pair, data):
    _, tokenizer = pair
    ids = ids_of(data, tokenizer)
    stream = TextStream(tokenizer)
    text = "".join(stream.add([each]) for each in ids) + stream.finish()
    assert text == tokenizer.decode(np.asarray(ids, np.int64)).decode(errors="replace")


@settings(max_examples=100)
@given(st.data())
def test_text_is_that_of_the_library(pair, data):
    built, tokenizer = pair
    ids = ids_of(data, tokenizer)
    text, wanted = tokenizer.decode(np.asarray(ids, np.int64)).decode(errors="replace"), built.decode(ids)
    if "ByteFallback" not in built.to_str() or "\ufffd" not in wanted:
        assert text == wanted


@settings(max_examples=100)
@given(st.text("aé日 b.\n", max_size=12), st.integers(0, 20))
def test_output_continues_the_prompt(pair, text, border):
    """The prompt and the output are those of one text, cut anywhere between two tokens."""
    built, tokenizer = pair
    ids = built.encode(text, add_special_tokens=False).ids
    prompt, output = ids[:border], ids[border:]
    before = tokenizer.decode(np.asarray(prompt, np.int64)).decode(errors="ignore")
    stream = TextStream(tokenizer, prompt=prompt)
    assert before + "".join(stream.add([each]) for each in output) + stream.finish() == built.decode(ids)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_bytes_of_incomplete_characters(kind):
    """`tokenizers` replaces them by U+FFFD, from which a stream cannot restore the character."""
    built = KINDS[kind]()
    names = characters() if kind == "byte level" else [f"<0x{byte:02X}>" for byte in range(256)]
    ids = [built.token_to_id(names[byte]) for byte in "日".encode()]
    decode = bytes_decoder(built)
    assert [decode(ids[:n]) for n in range(4)] == ["日".encode()[:n] for n in range(4)]
