"""The text of a stream against the text of all tokens, for tokenizers whose tokens depend on their neighbours."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from axcore.infer.text import TextStream
from axcore.train.data import ByteTokenizer


class Words:
    """Tokens are words after a space, which the first token of a text loses, as in SentencePiece. Some are bytes, one
    is a space alone, and one is special."""

    pieces = (b"", b" ", b" a", b"b", b" ab", b"  ", "é".encode(), b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\n")

    def __init__(self):
        self.longest = 0

    def decode(self, ids):
        self.longest = max(self.longest, len(ids))
        return b"".join(self.pieces[each] for each in ids).removeprefix(b" ")


class Doubled(Words):
    """Repeated tokens count once, as in CTC."""

    def decode(self, ids):
        return b"".join(b"xyz"[a : a + 1] for a, b in itertools.pairwise([*ids, -1]) if a != b)


KINDS = {
    "bytes": (ByteTokenizer.Config().build(), 264),
    "words": (Words(), len(Words.pieces)),
    "doubled": (Doubled(), 3),
}
kinds = st.sampled_from(sorted(KINDS)).flatmap(
    lambda kind: st.tuples(st.just(kind), st.lists(st.integers(0, KINDS[kind][1] - 1), max_size=30))
)
cuts = st.lists(st.integers(0, 30), max_size=5)


def streamed(tokenizer, ids, at=(), prompt=(), stop=(), each=lambda stream, piece: None):
    stream, pieces = TextStream(tokenizer, prompt=prompt, stop=stop), []
    for start, end in zip([0, *sorted(at)], [*sorted(at), len(ids)], strict=True):
        pieces.append(stream.add(ids[start:end]))
        each(stream, pieces)
    return "".join([*pieces, stream.finish()]), stream


def whole(tokenizer, ids):
    return tokenizer.decode(np.asarray(ids, np.int64)).decode(errors="replace")


@given(kinds, cuts)
def test_pieces_join_to_the_whole_text(sample, at):
    kind, ids = sample
    tokenizer = KINDS[kind][0]
    text, stream = streamed(tokenizer, ids, at)
    assert text == whole(tokenizer, ids) and stream.num_tokens == len(ids)


@given(kinds, st.integers(0, 30))
def test_output_continues_the_prompt(sample, border):
    """Including spaces and characters that begin in the prompt."""
    kind, ids = sample
    tokenizer, (prompt, output) = KINDS[kind][0], (ids[:border], ids[border:])
    before = tokenizer.decode(np.asarray(prompt, np.int64)).decode(errors="ignore")
    text, _ = streamed(tokenizer, output, prompt=prompt)
    both = whole(tokenizer, ids)
    if "\ufffd" not in both:
        assert before + text == both
    assert both.endswith(text)


@given(kinds)
def test_text_is_certain_as_soon_as_possible(sample):
    kind, ids = sample
    tokenizer, stream, text = KINDS[kind][0], TextStream(KINDS[kind][0]), ""
    for count in range(1, len(ids) + 1):
        text += stream.add(ids[count - 1 : count])
        so_far = tokenizer.decode(np.asarray(ids[:count], np.int64))
        missing = next(
            (n for n in range(1, 4) if len(so_far) >= n and is_start_of_character(so_far[len(so_far) - n :])), 0
        )
        assert text == so_far[: len(so_far) - missing].decode(errors="replace")


def is_start_of_character(given):
    """Whether more bytes can complete a character, by trying."""
    tails = [b"", b"\x80", b"\xa0", b"\x90", b"\x80\x80", b"\xa0\x80", b"\x90\x80", b"\x80\x80\x80", b"\x90\x80\x80"]
    for tail in tails[1:]:
        try:
            if len((given + tail).decode()) == 1:
                return True
        except UnicodeDecodeError:
            continue
    return False


def first_stop(text, stop):
    """(text before it, stop string) of the one that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        if found := [each for each in stop if text[:end].endswith(each)]:
            match = max(found, key=len)
            return text[: end - len(match)], match
    return text, None


@settings(max_examples=200)
@given(
    st.text("abc", max_size=25),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts,
)
def test_stop_strings(text, stop, at):
    tokenizer = KINDS["bytes"][0]
    wanted, match = first_stop(text, stop)

    def each(stream, pieces):
        """Only what may be the start of a stop string is held back."""
        so_far = text[: stream.num_tokens]
        if stream.stopped is None:
            held = max(n for n in range(len(so_far) + 1) if any(s.startswith(so_far[len(so_far) - n :]) for s in stop))
            assert "".join(pieces) == so_far[: len(so_far) - held]

    found, stream = streamed(tokenizer, list(text.encode()), at, stop=stop, each=each)
    assert (found, stream.stopped) == (wanted, match)
    assert stream.num_tokens == (len(text) if match is None else len(wanted) + len(match))


@given(kinds, st.lists(st.sampled_from(["a", " a", "é", "\n", "a b", " ab ", "€", "\ufffd", "yz"]), max_size=3))
def test_stop_strings_of_other_tokenizers(sample, stop):
    kind, ids = sample
    tokenizer = KINDS[kind][0]
    text, stream = streamed(tokenizer, ids, stop=stop)
    assert (text, stream.stopped) == first_stop(whole(tokenizer, ids), stop)


@pytest.mark.parametrize("bytes_in_prompt", [1, 2, 3])
def test_character_that_begins_in_the_prompt(bytes_in_prompt):
    prompt, output = "a😀".encode()[: 1 + bytes_in_prompt], "😀b".encode()[bytes_in_prompt:]
    assert streamed(KINDS["bytes"][0], list(output), prompt=list(prompt))[0] == "😀b"


def test_stop_strings_are_not_searched_in_the_prompt():
    stream = TextStream(KINDS["bytes"][0], prompt=list(b"one\n"), stop=("\n\n",))
    assert stream.add(b"\ntwo\n") + stream.finish() == "\ntwo\n" and stream.stopped is None


def test_nothing_follows_a_stop_string():
    stream = TextStream(KINDS["bytes"][0], stop=("</s>",))
    assert stream.add(b"a</") == "a"
    assert stream.add(b"s>b\xc3") == "" == stream.finish()
    assert (stream.stopped, stream.num_tokens, stream.add(b"c")) == ("</s>", 5, "")


@pytest.mark.parametrize("tail", [b"\xe2", b"\xe2\x82", b"\xf0\x9f\x98"])
def test_incomplete_character_at_the_end(tail):
    stream = TextStream(KINDS["bytes"][0], stop=("\ufffdx",))
    assert stream.add(b"a" + tail) == "a"
    assert (stream.finish(), stream.finish()) == ("\ufffd", "")


def test_each_token_costs_the_same():
    tokenizer = Words()
    stream = TextStream(tokenizer, prompt=[2] * 1000, stop=("never",))
    for each in np.random.default_rng(0).integers(0, len(Words.pieces), 2000):
        stream.add([each])
    assert tokenizer.longest <= 8
