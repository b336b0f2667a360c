"""Answers of `/v1/embeddings` have the form that the client of OpenAI expects."""

import base64
import re

import numpy as np
import openai
import pytest

from axcore_serve.gate import Limits

from .scripted import Scripted
from .support import posted, serving, wait_until

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def running():
    with serving(Scripted(), Limits(max_samples=4), pooling="mean") as running:
        yield running


@pytest.fixture(scope="module")
def client(running):
    with running.client() as client:
        yield client


def unit(*values):
    return np.array(values) / np.linalg.norm(values)


@pytest.mark.parametrize("encoding", [None, "float", "base64"])  # None: the client asks for base64 and decodes it
def test_embeddings_have_length_1_in_the_order_of_the_inputs(client, encoding):
    options = {} if encoding is None else {"encoding_format": encoding}
    found = client.embeddings.create(model="tiny", input=[[3, 5], [2], [1, 2, 6]], user="someone", **options)
    assert (found.object, found.model) == ("list", "tiny")
    assert [(each.object, each.index) for each in found.data] == [("embedding", at) for at in range(3)]
    for each, expected in zip(found.data, ([4, 2, 0], [2, 1, 0], [3, 3, 0]), strict=True):
        values = each.embedding
        if isinstance(values, str):
            values = np.frombuffer(base64.b64decode(values), "<f4")
        np.testing.assert_allclose(values, unit(*expected), atol=1e-6)
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (6, 6)


def test_texts_are_tokenized_like_prompts(client, running):
    text = client.embeddings.create(model="tiny", input="hé", dimensions=3)
    ids = running.engine.tokenizer.prompt("hé".encode()).tolist()
    assert text.data[0].embedding == client.embeddings.create(model="tiny", input=ids).data[0].embedding
    assert text.usage.prompt_tokens == len(ids)
    assert not running.service.gate.num_samples


@pytest.mark.parametrize(
    ("change", "param", "text"),
    [
        ({"input": []}, "input", "must be a string"),
        ({"input": [[]]}, "input", "must be a string"),
        ({"input": None}, "input", "input is required"),
        ({"input": [264]}, "input", "token id 264 is not below 264"),
        ({"input": [1] * 4096}, "input", "input: a prompt of 4096 tokens leaves no room"),
        ({"input": ["a"] * 5}, "input", "input: the request has 5 samples, must have at most 4"),
        ({"dimensions": 2}, "dimensions", "dimensions=2: an embedding of this model has 3 numbers"),
        ({"dimensions": 0}, "dimensions", "dimensions=0"),
        ({"encoding_format": "int8"}, "encoding_format", "encoding_format='int8': must be 'float' or 'base64'"),
        ({"stream": True}, "stream", "stream is not a parameter"),
        ({"temperature": 1}, "temperature", "temperature is not a parameter"),
    ],
)
def test_bad_values_are_named(running, change, param, text):
    status, found = posted(running, {"model": "tiny", "input": "a", **change}, PATH)
    error = found["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert re.search(text, error["message"]), error
    assert not running.service.gate.num_samples


def test_an_unknown_model_and_a_server_without_embeddings(client):
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' does not exist"):
        client.embeddings.create(model="gpt", input="a")
    with serving(Scripted()) as running:
        status, found = posted(running, {"model": "tiny", "input": "a"}, PATH)
        assert status == 400 and "was started with --embeddings" in found["error"]["message"]


def test_a_client_that_leaves_cancels():
    engine = Scripted(holds=True)
    with serving(engine, pooling="last") as running, running.client() as client:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).embeddings.create(model="tiny", input=["a", "b"])
        wait_until(lambda: len(engine.jobs) == 2 and all(job.is_cancelled for job in engine.jobs))
        wait_until(lambda: not running.service.gate.num_samples)
