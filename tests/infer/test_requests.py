"""Options and requests: values outside of their range, and tokens outside of the vocabulary."""

import pickle

import numpy as np
import pytest

from axcore.config import ConfigError
from axcore.infer.requests import Request, SamplingOptions

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.5}, "temperature must be at least 0, not -0.5. Use 0 to select the most likely token"),
        ({"temperature": NAN}, "temperature must be .*finite.*, not nan. Use 0"),
        ({"temperature": INF}, "temperature must be .*finite.*, not inf. Use 0"),
        ({"temperature": "hot"}, "temperature must be float, not 'hot'. Use 0"),
        ({"temperature": True}, "temperature must be float, not True"),
        ({"temperature": None}, "temperature must be float, not None"),
        ({"top_k": 0}, "top_k must be at least 1 or None, not 0. Use None to choose from all tokens"),
        ({"top_k": True}, "top_k must be int or None, not True"),
        ({"top_k": 2.0}, r"top_k must be int or None, not 2\.0"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0. Use 1 to choose from all tokens"),
        ({"top_p": 1.01}, "top_p must be above 0 and at most 1, not 1.01"),
        ({"top_p": 1e-60}, "top_p must be above 0 and at most 1 after rounding to float32, not 1e-60"),
        ({"min_p": -0.1}, "min_p must be at least 0 and at most 1, not -0.1. Use 0"),
        ({"min_p": NAN}, "min_p must be .* not nan"),
        ({"frequency_penalty": INF}, "frequency_penalty must be finite, not inf. Use 0 for no penalty"),
        ({"presence_penalty": NAN}, "presence_penalty must be finite, not nan. Use 0 for no penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0, not 0.0. Use 1 for no penalty"),
        ({"logit_bias": {3: NAN}}, "logit_bias must be finite in 3, not .*nan.*. Map token ids to finite numbers"),
        ({"logit_bias": {3: "much"}}, r"logit_bias must be Mapping\[int, float\], not .*much"),
        ({"logit_bias": [3]}, r"logit_bias must be Mapping\[int, float\], not \(3,\)"),
        (
            {"logit_bias": {"3": 1.0}},
            "logit_bias=.*: '3' is not a token id, .* Convert the keys of JSON objects with int",
        ),
        ({"logit_bias": {-3: 1.0}}, "logit_bias=.*: -3 is not a token id"),
        ({"logit_bias": {True: 1.0}}, "logit_bias=.*: True is not a token id"),
        ({"seed": 1.5}, "seed must be int or None, not 1.5. Use None for a random seed"),
        ({"seed": True}, "seed must be int or None, not True"),
        ({"max_tokens": 0}, "max_tokens must be at least 1 or None, not 0. Use None"),
        ({"max_tokens": True}, "max_tokens must be int or None, not True"),
        ({"min_tokens": -1}, "min_tokens must be at least 0, not -1. Use 0 for no minimum"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 must be at most sampling.max_tokens=4. Reduce min_tokens"),
        ({"stop": "end"}, r"stop must be tuple\[str, ...\], not 'end'. Write one string as \('text',\)"),
        ({"stop": ("a", "")}, r"stop=\('a', ''\): .* at least one character. Remove the empty string"),
        ({"stop": (b"a",)}, r"stop must be tuple\[str, ...\]"),
        (
            {"stop_token_ids": (-1,)},
            r"stop_token_ids must be at least 0 in item 0, not \(-1,\). Use the ids of the tokenizer",
        ),
        ({"stop_token_ids": (1.0,)}, r"stop_token_ids must be tuple\[int, ...\], not \(1.0,\)"),
        ({"ignore_eos": 1}, "ignore_eos must be bool, not 1. Use True or False"),
        ({"logprobs": -1}, "logprobs must be at least 0 or None, not -1. Use None"),
        ({"logprobs": True}, "logprobs must be int or None, not True"),
    ],
)
def test_wrong_options_are_refused(values, message):
    with pytest.raises(ConfigError, match=f"^sampling.{message}"):
        SamplingOptions(**values)


def test_every_number_has_a_test_of_nan_or_bool():
    for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        for value in (NAN, INF, -INF, True):
            with pytest.raises(ConfigError, match=f"^sampling.{name} must be"):
                SamplingOptions(**{name: value})
    for name in ("top_k", "seed", "max_tokens", "min_tokens", "logprobs"):
        for value in (NAN, True, 1.0, "1"):
            with pytest.raises(ConfigError, match=f"^sampling.{name} must be"):
                SamplingOptions(**{name: value})


def test_extreme_options_are_accepted():
    SamplingOptions(temperature=0, top_k=1, top_p=1, min_p=1, repetition_penalty=0.1, seed=-(2**70), logprobs=0)
    SamplingOptions(
        max_tokens=4, min_tokens=4, frequency_penalty=-2, presence_penalty=2, stop=("\n",), stop_token_ids=(0,)
    )


def test_options_are_immutable_values():
    bias = {3: 1}
    options = SamplingOptions(logit_bias=bias, stop=["a", "b"], temperature=1)
    bias[3] = 2
    assert options == SamplingOptions(logit_bias={3: 1.0}, stop=("a", "b")) and options.logit_bias == {3: 1.0}
    assert hash(options) == hash(pickle.loads(pickle.dumps(options)))
    with pytest.raises(TypeError):
        options.logit_bias[3] = 2


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((3, 10)), "request.ids: token id 10 is not below 10, the size of the vocabulary"),
        (
            Request((3,), SamplingOptions(stop_token_ids=(1, 12))),
            "sampling.stop_token_ids: token id 12 is not below 10",
        ),
        (Request((3,), SamplingOptions(logit_bias={10: 0.5})), "sampling.logit_bias: token id 10 is not below 10"),
        (Request((3,), SamplingOptions(logprobs=11)), "sampling.logprobs=11 must be at most 10"),
    ],
)
def test_ids_outside_of_the_vocabulary_are_refused(request_, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        request_.check(10)


def test_ids_inside_of_the_vocabulary_are_accepted():
    Request((0, 9), SamplingOptions(stop_token_ids=(9,), logit_bias={0: 1.0, 9: 1.0}, logprobs=10)).check(10)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ids": ()}, r"request.ids=\(\) must have at least one token. Start the prompt with the BOS token"),
        ({"ids": (1, -1)}, "request.ids: -1 is not a token id, an int of at least 0. Use the ids of the tokenizer"),
        ({"ids": (1, True)}, "request.ids: True is not a token id"),
        ({"ids": (1.0,)}, "request.ids: 1.0 is not a token id"),
        ({"ids": np.array([1, 2])}, r"request.ids: np.int64\(1\) is not a token id, .* ids.tolist\(\) of an array"),
        ({"ids": "12"}, "request.ids: '1' is not a token id"),
        ({"options": {}}, "request.options must be SamplingOptions, not {}. Use SamplingOptions()"),
        ({"priority": 0.5}, "request.priority must be int, not 0.5"),
        ({"salt": None}, "request.salt must be str, not None"),
        ({"adapter": 3}, "request.adapter must be str or None, not 3"),
    ],
)
def test_wrong_requests_are_refused(values, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        Request(**{"ids": (1,)} | values)


def test_a_list_of_ids_becomes_a_tuple():
    assert Request([1, 2]) == Request((1, 2))
