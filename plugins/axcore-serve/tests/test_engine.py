"""The server on a real engine."""

import asyncio
import json
import threading

import numpy as np
import pytest

from axcore.infer import SamplingOptions
from axcore_serve.gate import Limits

from .support import posted, raw, serving, tiny_engine, wait_until

pytestmark = pytest.mark.long
PROMPTS = [f"prompt {number} " * (number + 1) for number in range(8)]


@pytest.fixture(scope="module")
def engine():
    with tiny_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def served(engine):
    with serving(engine, Limits(max_samples=32), scores_prompts=True) as running:
        yield running


def is_empty(engine):
    stats = engine.stats
    return stats.running == stats.waiting == stats.pages.live == 0


def test_eight_streams_at_once_equal_their_whole_answers(served, engine):
    body = {"model": "tiny", "max_tokens": 24, "temperature": 0.8, "stop": ["a", "e "]}

    async def streamed(client, number):
        text, finish = "", None
        stream = await client.completions.create(**body, prompt=PROMPTS[number], seed=number, stream=True)
        async for chunk in stream:
            text += chunk.choices[0].text
            finish = finish or chunk.choices[0].finish_reason
        return text, finish

    async def all_streams():
        async with served.aclient() as client:
            return await asyncio.gather(*(streamed(client, number) for number in range(8)))

    found = asyncio.run(all_streams())
    for number, (text, finish) in enumerate(found):
        _, whole = posted(served, {**body, "prompt": PROMPTS[number], "seed": number})
        assert (text, finish) == (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"])
    assert len({text for text, _ in found}) > 4
    wait_until(lambda: is_empty(engine))


def test_greedy_text_and_scores_are_those_of_the_engine(served, engine):
    body = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": 12, "logprobs": 2, "echo": True}
    choice = posted(served, body)[1]["choices"][0]
    options = SamplingOptions(temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs=True)
    expected = engine.generate([engine.request("hello", options)])[0]
    assert choice["text"] == "hello" + expected.text
    found = choice["logprobs"]["token_logprobs"]
    assert found[0] is None
    assert found[1:] == pytest.approx([each.logprob for each in (*expected.prompt_logprobs, *expected.logprobs)])
    assert len(choice["logprobs"]["top_logprobs"][-1]) in (2, 3)
    # Scoring all of it gives what sampling gave.
    ids = [*engine.request("hello").ids, *expected.ids]
    scored = posted(served, {**body, "prompt": ids, "max_tokens": 0})[1]["choices"][0]
    assert scored["logprobs"]["token_logprobs"][1:] == pytest.approx(found[1:], abs=1e-4)


def test_a_stop_token_with_text_is_in_the_text(served, engine):
    body = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": 12}
    ids = engine.generate([engine.request("hello", SamplingOptions(temperature=0.0, max_tokens=12))])[0].ids
    stop = next(id for id in ids if id < 128)
    text = posted(served, body)[1]["choices"][0]["text"]
    whole = posted(served, {**body, "stop_token_ids": [stop]})[1]
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(chr(stop)) + 1], "stop")
    assert whole["usage"]["completion_tokens"] == ids.index(stop) + 1


def test_samples_of_a_seed_differ_and_can_be_repeated(served):
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 12, "n": 3, "seed": 5}
    texts = [choice["text"] for choice in posted(served, body)[1]["choices"]]
    assert len(set(texts)) == 3
    assert [choice["text"] for choice in posted(served, body)[1]["choices"]] == texts
    assert posted(served, {**body, "n": 1})[1]["choices"][0]["text"] == texts[0]


def test_clients_that_leave_give_their_pages_back(served, engine):
    async def leave():
        async with served.aclient() as client:
            for _ in range(3):
                streams = [
                    await client.completions.create(model="tiny", prompt=prompt, max_tokens=60, n=2, stream=True)
                    for prompt in PROMPTS[:3]
                ]
                for stream in streams:
                    await anext(aiter(stream))
                    await stream.close()

    asyncio.run(leave())
    wait_until(lambda: is_empty(engine) and not served.service.gate.num_samples)
    pages = engine.stats.pages
    assert pages.cached + pages.free == 80


def test_a_stream_that_is_cancelled_before_it_runs_computes_nothing(served, engine):
    is_busy, goes_on = threading.Event(), threading.Event()

    def deliver(_):
        is_busy.set()
        goes_on.wait(20)

    one = engine.request("a", SamplingOptions(max_tokens=1))
    engine.submit(one, deliver)
    assert is_busy.wait(20)
    tokens = engine.stats.tokens
    with served.client() as client:
        for prompt in PROMPTS[:2]:
            client.completions.create(model="tiny", prompt=prompt, n=2, stream=True).close()
    wait_until(lambda: not served.service.gate.num_samples)
    goes_on.set()
    engine.generate([one])  # comes after the others
    wait_until(lambda: is_empty(engine))
    assert engine.stats.tokens == tokens + 1


def test_nothing_compiles_after_the_warm_up():
    with tiny_engine(max_rows=2, max_len=32, step_tokens=16) as engine:
        engine.warm_up(prompt_logprobs=True)
        compiled = engine.stats.compiled
        with serving(engine, scores_prompts=True) as running:
            for body in (
                {"temperature": 0},
                {"n": 2, "top_p": 0.9, "frequency_penalty": 1, "logprobs": 5},
                {"echo": True, "logprobs": 1, "prompt": "long enough for chunks"},
            ):
                whole = {"model": "tiny", "prompt": "a", "max_tokens": 8, "ignore_eos": True, **body}
                assert posted(running, whole)[0] == 200
            stats = json.loads(raw(running, None, path="/stats", method="GET")[2])
    assert stats["compiled"] == compiled > 0
    assert stats["tokens"] >= 4 * 8 and sum(stats["pages"].values()) == 80


def test_usage_has_the_prompt_tokens_that_were_cached(engine):
    texts = ["a prompt that no other test has asked about", "nor this one: it is shorter"]
    cached = [len(text) // 8 * 8 for text in texts]  # BOS, the text, and the last token is always computed
    body = {"model": "tiny", "prompt": texts, "n": 2, "max_tokens": 3}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": texts[1]}], "max_tokens": 3}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    with serving(engine, scores_prompts=True, pooling="last") as running, running.client() as client:
        found = [client.completions.create(**body).usage for _ in range(2)]
        *_, last = client.completions.create(**body, **usage)
        # Samples of a request share its prompt, which counts once.
        assert [each.prompt_tokens_details.cached_tokens for each in (*found, last.usage)] == [0, *2 * [sum(cached)]]
        assert found[1] == last.usage and found[0].prompt_tokens == sum(map(len, texts)) + 2
        first, again = (client.chat.completions.create(**chat).usage for _ in range(2))
        *_, last = client.chat.completions.create(**chat, **usage)
        assert first.prompt_tokens_details.cached_tokens == 0 and again == last.usage
        assert again.prompt_tokens_details.cached_tokens == (again.prompt_tokens - 1) // 8 * 8
        scored = client.completions.create(model="tiny", prompt=texts[0], echo=True, logprobs=1, max_tokens=0).usage
        assert scored.prompt_tokens_details.cached_tokens == 0  # the scores of all tokens are computed
        found = client.embeddings.create(model="tiny", input=texts).usage
        assert found.prompt_tokens_details == {"cached_tokens": sum(cached)}  # not a field of the client's class


def test_embeddings_are_those_of_the_engine(engine):
    texts = ["hello", "a longer text than a step has tokens " * 3]
    with serving(engine, pooling="mean") as running, running.client() as client:
        found = client.embeddings.create(model="tiny", input=texts)
    for each, expected in zip(found.data, engine.embed(texts, pooling="mean"), strict=True):
        np.testing.assert_allclose(each.embedding, expected, atol=1e-6)
    assert found.usage.prompt_tokens == sum(len(engine.request(text).ids) for text in texts)
