"""`/v1/completions`: form and text of whole answers and of streams."""

import random

import openai
import pytest

from .scripted import Scripted
from .support import events, posted, serving

ALPHABET = ["a", "b", "ab", " ", "é", "日本", "🙂", "\n"]


def answer_of(data):
    """Text, finish reason and usage of each choice of a stream."""
    texts, finish, usage = {}, {}, None
    for chunk in data:
        usage = chunk.get("usage")
        for choice in chunk["choices"]:
            assert choice["index"] not in finish, "a chunk after the last one"
            assert "finish_reason" in choice
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"] is not None:
                finish[choice["index"]] = choice["finish_reason"]
    return texts, finish, usage


def text_before_stop(text, stops):
    """The text before the stop string that is complete first; of several, before the longest."""
    ends = [(text.index(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return None
    end, negative = min(ends)
    return text[: end + negative]


def test_a_stream_is_the_whole_answer_in_pieces(running):
    rng = random.Random(0)
    for case in range(40):
        text = "".join(rng.choice(ALPHABET) for _ in range(12))
        ids = [*text.encode(), *(rng.randrange(256) for _ in range(case % 4))]
        running.engine.ids, length = ids, rng.randint(1, len(ids))
        stops = ["".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, 3))) for _ in range(case % 3)]
        body = {"model": "tiny", "prompt": "x", "max_tokens": length, "n": 2, "stop": stops or None}
        status, whole = posted(running, body)
        assert status == 200, whole
        texts, finish, usage = answer_of(events(running, {**body, "stream_options": {"include_usage": True}}))
        assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
        assert finish == {choice["index"]: choice["finish_reason"] for choice in whole["choices"]}
        assert usage == whole["usage"]
        complete = bytes(ids[:length]).decode(errors="replace")
        before = text_before_stop(complete, stops)
        assert whole["choices"][0]["text"] == (complete if before is None else before)
        assert whole["choices"][0]["finish_reason"] == ("length" if before is None else "stop")
        if before is None:
            assert whole["usage"]["completion_tokens"] == 2 * length


def test_text_is_held_back_only_while_it_may_be_a_stop_string(running):
    running.engine.ids = list(b"ab<</t")
    body = {"model": "tiny", "prompt": "x", "max_tokens": 6, "stop": ["</think>"]}
    texts = [chunk["choices"][0]["text"] for chunk in events(running, body)]
    assert texts == ["a", "b", "<", "</t"]


def test_an_end_token_is_not_in_the_text_and_counts(running):
    running.engine.ids = [*b"ab", 256, *b"c"]
    _, whole = posted(running, {"model": "tiny", "prompt": "x", "max_tokens": 9})
    assert whole["choices"][0] | {"logprobs": 0} == {"index": 0, "text": "ab", "logprobs": 0, "finish_reason": "stop"}
    assert whole["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_cached_tokens_of_a_prompt_count_once(running, client):
    """With the client of OpenAI. Two prompts of 4 and 3 tokens, of which the engine has found all but the last."""
    prompts = ["abc", "de"]
    found = client.completions.create(model="tiny", prompt=prompts, n=3, max_tokens=2)
    assert len(found.choices) == 6 and found.usage.prompt_tokens == 7
    assert found.usage.prompt_tokens_details.cached_tokens == 5


def test_chunks_have_the_form_of_openai(running):
    running.engine.ids = list(b"ab")
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    plain = events(running, body)
    assert [chunk["choices"][0]["finish_reason"] for chunk in plain] == [None, "length"]
    assert all("usage" not in chunk for chunk in plain)
    assert {chunk["object"] for chunk in plain} == {"text_completion"} and len({chunk["id"] for chunk in plain}) == 1
    assert events(running, {**body, "stream_options": {}})[-1]["choices"]  # no chunk with the usage
    *others, last = events(running, {**body, "stream_options": {"include_usage": True}})
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2


def test_samples_of_prompts_are_numbered_by_prompt(running):
    running.engine.ids, running.engine.jobs = list(b"ab"), []
    body = {"model": "tiny", "prompt": ["p", "qr"], "n": 3, "max_tokens": 2, "seed": 7, "echo": True}
    _, whole = posted(running, body)
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert [choice["text"] for choice in whole["choices"]] == ["pab"] * 3 + ["qrab"] * 3
    assert [job.sample for job in running.engine.jobs] == [0, 1, 2, 0, 1, 2]  # seeds draw other samples
    assert {job.request.options.seed for job in running.engine.jobs} == {7}
    assert whole["usage"]["prompt_tokens"] == 2 + 3  # once for each prompt, not for each sample


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [(256, 104, 105)]),
        ([104, 105], [(104, 105)]),
        (["a", "b"], [(256, 97), (256, 98)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
def test_case_prompts_are_texts_or_token_ids(running, prompt, expected):
    running.engine.jobs = []
    assert posted(running, {"model": "tiny", "prompt": prompt})[0] == 200
    assert [job.request.ids for job in running.engine.jobs] == expected


def test_echo_continues_the_last_character_of_a_prompt_of_tokens(running):
    running.engine.ids = [0xA9, *b"x"]
    body = {"model": "tiny", "prompt": [*b"caf", 0xC3], "max_tokens": 2, "echo": True}
    assert posted(running, body)[1]["choices"][0]["text"] == "caféx"
    assert "".join(chunk["choices"][0]["text"] for chunk in events(running, body)) == "caféx"


def test_stop_strings_in_the_prompt_do_not_end_the_sample(running):
    running.engine.ids = list(b"bc")
    body = {"model": "tiny", "prompt": "xa", "max_tokens": 2, "echo": True, "stop": ["ab", "xa"]}
    choice = posted(running, body)[1]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("xabc", "length")


def test_echo_without_tokens_scores_the_prompt(running):
    running.engine.ids = list(b"zz")
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 1}
    whole = posted(running, body)[1]
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["token_id:256", "a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
    assert choice["logprobs"]["top_logprobs"] == [None, {"a": -0.25}, {"b": -0.25}]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]
    assert whole["usage"]["prompt_tokens"] == whole["usage"]["total_tokens"] == 3
    assert whole["usage"]["completion_tokens"] == 0
    status, error = posted(running, {**body, "echo": False})
    assert status == 400 and error["error"]["param"] == "max_tokens"


def test_echo_and_its_scores_are_in_the_first_chunk(running):
    running.engine.ids = list(b"xy")
    body = {"model": "tiny", "prompt": ["ab", "c"], "max_tokens": 2, "echo": True, "logprobs": 2, "n": 2}
    _, whole = posted(running, body)
    data = [chunk["choices"][0] for chunk in events(running, body)]
    for choice in whole["choices"]:
        own = [each for each in data if each["index"] == choice["index"]]
        assert [each["text"] for each in own] == [choice["text"][:-1], choice["text"][-1]]
        found = choice["logprobs"]
        assert {name: [each for one in own for each in one["logprobs"][name]] for name in found} == found
        assert found["text_offset"] == [0, *range(len(choice["text"]))]
        assert len(found["tokens"]) == len(own[0]["logprobs"]["tokens"]) + 1


def test_logprobs_name_every_token(running):
    running.engine.ids = [*"é".encode(), *b"x"]
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 3, "logprobs": 5}
    found = posted(running, body)[1]["choices"][0]["logprobs"]
    assert found["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "x"]
    assert found["text_offset"] == [0, 0, 1]
    assert found["top_logprobs"][2] == {
        "x": -0.25, "bytes:\\x80": -1.5, "bytes:\\x81": -9999.0, "token_id:260": -2.0, "token_id:261": -3.0
    }  # fmt: skip
    data = events(running, body)
    streamed = [chunk["choices"][0]["logprobs"] for chunk in data]
    assert {name: [each for some in streamed for each in some[name]] for name in found} == found
    assert [chunk["choices"][0]["text"] for chunk in data] == ["", "é", "x"]  # none is lost with an empty text
    assert posted(running, {**body, "logprobs": None})[1]["choices"][0]["logprobs"] is None


def test_two_tokens_with_one_text_keep_both_logprobs():
    class Twins(type(Scripted().tokenizer)):
        def decode(self, ids):
            return super().decode([97 if id == 98 else id for id in ids])

    from axcore.train.data import ByteTokenizer
    from axcore_serve.token_text import TokenText

    tokens = TokenText(Twins(ByteTokenizer.Config()))
    assert tokens.named([(97, -1.0), (98, -2.0)]) == {"a": -1.0, "token_id:98": -2.0}


def test_options_reach_the_engine(running, client):
    running.engine.jobs = []
    client.completions.create(
        model="tiny",
        prompt="a",
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        seed=-(2**62),
        logit_bias={"42": -100, "7": 1.5},
        stop="x",
        user="somebody",
        extra_body={
            "top_k": 4, "min_p": 0.1, "min_tokens": 2, "repetition_penalty": 1.1, "stop_token_ids": [3],
            "ignore_eos": True, "priority": -1, "cache_salt": "tenant",
        },
    )  # fmt: skip
    request = running.engine.jobs[0].request
    assert (request.priority, request.salt) == (-1, "tenant")
    options = request.options
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (0.5, 0.9, 4, 0.1)
    penalties = options.frequency_penalty, options.presence_penalty, options.repetition_penalty
    assert penalties == (0.1, 0.2, 1.1)
    assert (dict(options.logit_bias), options.seed) == ({42: -100, 7: 1.5}, -(2**62))
    assert (options.stop, options.stop_token_ids, options.ignore_eos) == (("x",), (3,), True)
    assert (options.max_tokens, options.min_tokens, options.logprobs) == (5, 2, None)


def test_the_default_length_fits_and_a_chosen_one_must(running, client):
    running.engine.jobs = []
    room = 10
    prompt = [1] * (running.engine.max_len - room)
    for ids, expected in ((prompt, room), ([1], 16)):
        client.completions.create(model="tiny", prompt=ids)
        assert running.engine.jobs[-1].request.options.max_tokens == expected
    with pytest.raises(openai.BadRequestError, match=r"max_tokens=11 and a prompt of .* Use at most 10") as caught:
        client.completions.create(model="tiny", prompt=prompt, max_tokens=room + 1)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError, match="leaves no room for output") as caught:
        client.completions.create(model="tiny", prompt=[1] * running.engine.max_len)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_scores_of_prompts_require_a_server_that_offers_them():
    with serving(Scripted()) as running:
        body = {"model": "tiny", "prompt": "a", "echo": True, "logprobs": 1}
        status, found = posted(running, body)
        assert status == 400 and "--prompt-logprobs" in found["error"]["message"]
        assert posted(running, {**body, "logprobs": None})[0] == 200
