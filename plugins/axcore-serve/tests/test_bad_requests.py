"""Requests that are refused: the status, the parameter, the value and what is expected; others are unharmed."""

import json
import re

import openai
import pytest

from axcore_serve.gate import Limits

from .scripted import Scripted
from .support import KEY, posted, raw, serving

GOOD = {"model": "tiny", "prompt": "a", "max_tokens": 2}


@pytest.fixture(autouse=True)
def unharmed(running):
    """A good request still gets its answer after each test."""
    yield
    running.engine.ids = list(b"ok")
    status, found = posted(running, GOOD)
    assert status == 200 and found["choices"][0]["text"] == "ok"
    assert running.service.gate.num_samples == running.service.gate.num_requests == 0


@pytest.mark.parametrize(
    ("change", "param", "text"),
    [
        ({"temperature": "hot"}, "temperature", "temperature='hot': must be a valid number"),
        ({"temperature": -1}, "temperature", "temperature must be .*at least 0.*-1"),
        ({"temperature": True}, "temperature", "temperature=True"),
        ({"top_p": 0}, "top_p", "top_p must be"),
        ({"top_p": 1.5}, "top_p", "top_p must be"),
        ({"top_k": 0}, "top_k", "top_k must be"),
        ({"top_k": 1.5}, "top_k", "top_k=1.5: must be a valid integer"),
        ({"min_p": 2}, "min_p", "min_p must be"),
        ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty must be"),
        ({"n": 0}, "n", "n=0: must be greater than or equal to 1"),
        ({"n": 65}, "n", "n: the request has 65 samples, must have at most 64"),
        ({"n": 1000}, "n", "n=1000: must be less than or equal to 128"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens=-1"),
        ({"max_tokens": 10**6}, "max_tokens", "Use at most"),
        ({"min_tokens": 5}, "min_tokens", "min_tokens=5 must be at most max_tokens=2"),
        ({"logprobs": 6}, "logprobs", "logprobs=6: must be less than or equal to 5"),
        ({"logprobs": True}, "logprobs", "logprobs=True"),
        ({"stop": ""}, "stop", "none of them empty"),
        ({"stop": ["a", 1]}, "stop", r"stop=\['a', 1\]: must be a string or a list of strings"),
        ({"stop": list("abcde")}, "stop", "at most 4"),
        ({"stop_token_ids": [264]}, "stop_token_ids", "token id 264 is not below 264"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids must be"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "must be an object from token ids to numbers"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "token id 9999 is not below 264"),
        ({"logit_bias": [1]}, "logit_bias", "must be an object"),
        ({"logit_bias": {"7": 1, "07": 2}}, "logit_bias", "must have one bias for each token id"),
        ({"logit_bias": {"7": 10**400}}, "logit_bias.7", "must be a valid number"),
        ({"logit_bias": {"7": 1e39}}, "logit_bias", "finite after rounding to float32"),
        ({"temperature": 10**400}, "temperature", "must be a valid number"),
        ({"top_k": 2**63}, "top_k", "at most 64 bits"),
        ({"max_tokens": 10**30}, "max_tokens", "at most 64 bits"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1", "must be a valid number"),
        ({"prompt": []}, "prompt", r"prompt=\[\]: must be a string"),
        ({"prompt": [[]]}, "prompt", "must be a string"),
        ({"prompt": ["a", [1]], "seed": "x"}, "seed", "must be a valid integer"),
        ({"prompt": [1, "a"]}, "prompt", "must be a string"),
        ({"prompt": [1.0]}, "prompt", "must be a string"),
        ({"prompt": {"a": 1}}, "prompt", "must be a string"),
        ({"prompt": [264]}, "prompt", "token id 264 is not below 264"),
        ({"prompt": [-1]}, "prompt", "-1 is not a token id"),
        ({"prompt": None}, "prompt", "prompt is required"),
        ({"model": None}, "model", "model is required"),
        ({"model": 3}, "model", "model=3: must be a valid string"),
        ({"stream": "yes"}, "stream", "must be a valid boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "requires stream=true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "not a parameter"),
        ({"temprature": 1}, "temprature", "temprature is not a parameter of this endpoint.*temperature"),
        ({"best_of": 3}, "best_of", "best_of is not a parameter"),
        ({"suffix": "x"}, "suffix", "suffix is not a parameter"),
        ({"priority": "high"}, "priority", "must be a valid integer"),
    ],
)
def test_case_bad_values_are_named(running, change, param, text):
    status, found = posted(running, {**GOOD, **change})
    error = found["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert re.search(text, error["message"]), error
    assert "sampling." not in error["message"] and "request." not in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nul",
        b'{"model": "tiny", "prompt": "a",}',
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'["model"]',
        b'"model"',
    ],
    ids=lambda body: body[:50].decode(errors="replace"),
)
def test_case_bodies_that_are_not_json_objects_are_refused(running, body):
    status, headers, content = raw(running, body)
    assert status == 400 and headers["content-type"] == "application/json", content
    assert json.loads(content)["error"]["message"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ('"prompt": "b"', "prompt"),
        ('"stream": true, "stream_options": {"include_usage": true, "include_usage": false}', "include_usage"),
        ('"logit_bias": {"65": 1, "65": 2}', "65"),
        ('"temperature": null, "temperature": 1', "temperature"),
    ],
)
def test_case_a_name_that_is_given_twice_is_refused(running, change, name):
    status, _, content = raw(running, f'{{"model": "tiny", "prompt": "a", {change}}}'.encode())
    error = json.loads(content)["error"]
    assert (status, error["param"]) == (400, name) and f"{name} is given twice" in error["message"]


def test_unknown_models_paths_and_methods(running, client):
    with pytest.raises(openai.NotFoundError, match=r"the model 'gpt' does not exist\. Use 'tiny'") as caught:
        client.completions.create(model="gpt", prompt="a")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt/4")
    assert client.models.retrieve("tiny").id == "tiny" and [each.id for each in client.models.list()] == ["tiny"]
    for path, method, expected in (("/v2/x", "GET", 404), ("/v1/completions", "GET", 405), ("/health", "POST", 405)):
        status, _, content = raw(running, None, path=path, method=method)
        assert status == expected and path in json.loads(content)["error"]["message"]


def test_a_key_is_required():
    with serving(Scripted(), keys=["sk-other", KEY]) as running:
        wrong = ("Bearer sk-wrong", KEY, "Bearer ", f"Basic {KEY}", f"Bearer {KEY}x")
        for headers in ({}, *({"Authorization": value} for value in wrong)):
            for path, method, body in (("/v1/models", "GET", None), ("/v1/completions", "POST", b"{}")):
                status, found, content = raw(running, body, path=path, method=method, headers=headers)
                assert (status, found["www-authenticate"]) == (401, "Bearer")
                assert json.loads(content)["error"]["type"] == "authentication_error"
        assert raw(running, b"x", headers={"Authorization": b"Bearer \xff\xfe"})[0] == 401
        with running.client(KEY) as client:
            assert client.completions.create(**GOOD).choices[0].text
        for path in ("/", "/health", "/metrics", "/stats"):
            assert raw(running, None, path=path, method="GET")[0] == 200


def test_large_and_slow_bodies_are_refused(running):
    limits = Limits(max_samples=4, max_body_bytes=1000, body_s=0.2)
    with serving(Scripted(b"ok"), limits) as small:
        fitting = json.dumps({**GOOD, "user": "x" * 900}).encode()
        assert raw(small, fitting)[0] == 200
        for body, chunked in ((b"x" * 1001, False), (iter([b"x" * 600] * 2), True)):
            headers = {"Transfer-Encoding": "chunked"} if chunked else {}
            status, _, content = raw(small, body, headers=headers, chunked=chunked)
            assert status == 413 and "larger than 1000 bytes" in json.loads(content)["error"]["message"]
        status, _, content = raw(small, b"{", headers={"Content-Length": "10"})
        assert status == 408, content
        assert posted(small, GOOD)[0] == 200
