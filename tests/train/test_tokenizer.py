"""The byte tokenizer, and what the input requires of any tokenizer."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from axcore.config import AxcoreError
from axcore.train.data import ByteTokenizer, Document, Tokenizer
from axcore.train.data.streams import encode, training_pairs


@given(st.binary(max_size=300))
def test_bytes_are_their_own_ids(content):
    tokenizer = ByteTokenizer.Config().build()
    ids = tokenizer.encode(content)
    assert ids.tolist() == list(content)
    assert tokenizer.decode(ids) == content


@pytest.mark.parametrize(("multiple", "vocab_size"), [(1, 257), (8, 264), (128, 384), (257, 257), (258, 258)])
def test_vocab_size_is_the_next_multiple(multiple, vocab_size):
    tokenizer = ByteTokenizer.Config(vocab_multiple=multiple).build()
    assert tokenizer.vocab_size == vocab_size > tokenizer.separator_id == 256


def test_separator_and_unused_ids_decode_to_nothing():
    tokenizer = ByteTokenizer.Config().build()
    assert tokenizer.decode(np.array([256, 104, 263, 105, 256])) == b"hi"


class Shifted(Tokenizer):
    """Encodes a byte as `byte + first`. The separator is 0, so with `first=0` it collides with NUL."""

    class Config(Tokenizer.Config):
        first: int = 1
        size: int = 257

    separator_id = 0

    def __init__(self, cfg):
        self.config = cfg
        self.vocab_size = cfg.size

    def encode(self, content):
        return np.frombuffer(content, np.uint8).astype(np.int64) + self.config.first

    def decode(self, ids):
        return bytes(int(i) - self.config.first for i in ids if i)


def test_separators_surround_each_document():
    tokenizer = Shifted.Config().build()
    assert encode(tokenizer, Document("a", b"xy")).tolist() == [0, 121, 122]
    assert encode(tokenizer, Document("a", b"xy", starts=False)).tolist() == [121, 122]
    pairs = training_pairs(tokenizer, Document("a", b"xy"))
    assert {name: ids.tolist() for name, ids in pairs.items()} == {"inputs": [0, 121, 122], "targets": [121, 122, 0]}
    middle = training_pairs(tokenizer, Document("a", b"xyz", starts=False, ends=False))
    assert {name: ids.tolist() for name, ids in middle.items()} == {"inputs": [121, 122], "targets": [122, 123]}


def test_id_outside_the_vocabulary_names_the_document():
    with pytest.raises(AxcoreError, match=r"Shifted encodes b\.txt to ids from 1 to 256.*vocab_size is 256"):
        encode(Shifted.Config(size=256).build(), Document("b.txt", b"\x00\xff"))


def test_separator_inside_a_document_raises():
    with pytest.raises(AxcoreError, match=r"Shifted encodes b\.txt to ids that include its separator_id=0"):
        encode(Shifted.Config(first=0).build(), Document("b.txt", b"a\0"))


def test_a_failing_tokenizer_is_named_with_document_and_line():
    class Broken(Shifted):
        def encode(self, content):
            raise LookupError("no such merge")

    with pytest.raises(
        AxcoreError, match=r"Broken cannot encode b\.txt: LookupError: no such merge \(.*test_token.*:\d+\)"
    ):
        encode(Broken.Config().build(), Document("b.txt", b"a"))
