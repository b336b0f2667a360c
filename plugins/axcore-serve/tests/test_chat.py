"""`/v1/chat/completions`: templates, tools, and the form of answers and streams."""

import json

import openai
import pytest

from axcore_serve.tools import Call, ToolText

from .scripted import Scripted
from .support import events, posted, serving

PATH = "/v1/chat/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "time")
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def prompt_of(running):
    return bytes(running.engine.jobs[-1].request.ids).decode()


def streamed(client, **body):
    """Content, tool calls and finish reason that a client puts together from a stream."""
    text, calls, finish = "", {}, None
    for chunk in client.chat.completions.create(**{**HELLO, **body}, stream=True):
        (choice,) = chunk.choices
        assert finish is None, "a chunk after the last one"
        finish = choice.finish_reason
        text += choice.delta.content or ""
        for each in choice.delta.tool_calls or ():
            held = calls.setdefault(each.index, {"id": None, "name": "", "arguments": ""})
            assert not (held["id"] and each.id), "the id comes once"
            held["id"] = held["id"] or each.id
            held["name"] += each.function.name or ""
            held["arguments"] += each.function.arguments or ""
    return text, [calls[index] for index in sorted(calls)], finish


def test_the_first_chunk_has_the_role_and_the_last_the_reason(running):
    running.engine.ids = list(b"ab")
    found = events(running, {**HELLO, "max_tokens": 2}, PATH)
    choices = [chunk["choices"][0] for chunk in found]
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert [each["delta"].get("content") for each in choices[1:]] == ["a", "b", None]
    assert [each["finish_reason"] for each in choices] == [None, None, None, "length"]
    assert choices[-1]["delta"] == {} and {each["object"] for each in found} == {"chat.completion.chunk"}
    *others, last = events(running, {**HELLO, "max_tokens": 2, "stream_options": {"include_usage": True}}, PATH)
    assert all(chunk["usage"] is None for chunk in others) and last["choices"] == []
    prompt = len("user: hi\nassistant: ")
    assert last["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 2,
        "total_tokens": prompt + 2,
        "prompt_tokens_details": {"cached_tokens": prompt - 1},
    }


def test_messages_become_a_prompt(running, client):
    running.engine.ids = [*b"ok", 256]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": "<b>"},
    ]
    found = client.chat.completions.create(model="tiny", messages=messages)
    assert prompt_of(running) == "system: Be brief.\nuser: one\ntwo\nassistant: fine\nuser: <b>\nassistant: "
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == ("ok", "stop")
    assert running.engine.jobs[-1].request.options.max_tokens is None  # to the end of the context


def test_max_completion_tokens_replaces_max_tokens(running, client):
    client.chat.completions.create(**HELLO, max_tokens=3, max_completion_tokens=4)
    assert running.engine.jobs[-1].request.options.max_tokens == 4
    with pytest.raises(openai.BadRequestError, match="max_completion_tokens=5000 and a prompt") as caught:
        client.chat.completions.create(**HELLO, max_completion_tokens=5000)
    assert caught.value.param == "max_completion_tokens"


def test_logprobs_of_chats_have_bytes(running, client):
    running.engine.ids = [*"é".encode(), 256]
    found = client.chat.completions.create(**HELLO, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [bytes(each.bytes or b"") for each in found] == [b"\xc3", b"\xa9", b""]
    assert [len(each.top_logprobs) for each in found] == [2, 2, 2]
    assert found[0].top_logprobs[1].bytes == [128]
    stream = client.chat.completions.create(**HELLO, logprobs=True, top_logprobs=2, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    assert [each for one in chunks if one.logprobs for each in one.logprobs.content] == found
    only = client.chat.completions.create(**HELLO, logprobs=True).choices[0].logprobs.content
    assert [each.top_logprobs for each in only] == [[], [], []]
    with pytest.raises(openai.BadRequestError, match="top_logprobs requires logprobs=true"):
        client.chat.completions.create(**HELLO, top_logprobs=2)


@pytest.mark.parametrize(
    ("output", "text", "names", "finish"),
    [
        ("plain", "plain", [], "stop"),
        (CALL, "", ["weather"], "tool_calls"),
        (f"Sure.{CALL}{CALL.replace('weather', 'time')}", "Sure.", ["weather", "time"], "tool_calls"),
        (CALL.replace("weather", "unknown"), CALL.replace("weather", "unknown"), [], "stop"),
        ("<tool_call>{oops</tool_call>", "<tool_call>{oops</tool_call>", [], "stop"),
        ('<tool_call>{"name": [1]}</tool_call>', '<tool_call>{"name": [1]}</tool_call>', [], "stop"),
        ("a<tool_", "a<tool_", [], "stop"),
    ],
)
def test_case_tool_calls_are_separated_from_text(running, client, output, text, names, finish):
    running.engine.ids = [*output.encode(), 256]
    whole = client.chat.completions.create(**HELLO, tools=TOOLS).choices[0]
    assert (whole.message.content or "", whole.finish_reason) == (text, finish)
    assert [call.function.name for call in whole.message.tool_calls or ()] == names
    assert all(json.loads(call.function.arguments) == {"city": "Köln"} for call in whole.message.tool_calls or ())
    assert whole.message.content is not None or names
    got, calls, reason = streamed(client, tools=TOOLS)
    assert (got, reason) == (text, finish) and [call["name"] for call in calls] == names
    assert [call["arguments"] for call in calls] == [call.function.arguments for call in whole.message.tool_calls or ()]
    assert all(call["id"] for call in calls) and len({call["id"] for call in calls}) == len(calls)


def test_a_call_that_is_cut_off_ends_by_length(running, client):
    running.engine.ids = list(f"x{CALL}".encode())
    for length, calls in ((20, 0), (len(running.engine.ids), 1)):
        got, found, reason = streamed(client, tools=TOOLS, max_tokens=length)
        assert (reason, len(found)) == ("length", calls)
        assert got == ("x" if calls else f"x{CALL}"[:20])


def test_text_is_held_back_only_while_it_may_be_a_call():
    text = ToolText(["f"])
    assert list(text.add("a<b")) == ["a<b"]
    assert list(text.add("<tool")) == [] and list(text.add("s>")) == ["<tools>"]
    assert list(text.add('<tool_call>{"name": "f"}</tool')) == []
    (call, rest) = text.add("_call>!")
    assert isinstance(call, Call) and (call.name, call.arguments, rest) == ("f", "{}", "!")
    assert text.finish() == ""


def test_tools_reach_the_template_and_earlier_calls_are_objects(running, client):
    described = {"type": "function", "function": {"name": "f", "description": "für <b>"}}
    client.chat.completions.create(**HELLO, tools=[described])
    assert prompt_of(running).startswith(
        'tools: [{"type": "function", "function": {"name": "f", "description": "für <b>"}}] as'
    )
    client.chat.completions.create(**HELLO, tools=TOOLS, tool_choice="none")
    assert "tools:" not in prompt_of(running)
    template = "{%- for message in messages %}{% for call in message.tool_calls %}{{ call.function.arguments.city }}"
    template += "{% endfor %}{{ message.content }};{% endfor %}"
    history = [
        *HELLO["messages"],
        {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]  # fmt: skip
    with serving(Scripted(), template=template) as other:
        assert posted(other, {"model": "tiny", "messages": history}, PATH)[0] == 200
        assert prompt_of(other) == "hi;Bonn;rain;"
        history[1]["tool_calls"][0]["function"]["arguments"] = "[1]"
        status, found = posted(other, {"model": "tiny", "messages": history}, PATH)
        assert (status, found["error"]["param"]) == (400, "messages.1.tool_calls.0.function.arguments")
        status, found = posted(other, {**HELLO, "tools": TOOLS}, PATH)
        assert status == 400 and "has no <tool_call>" in found["error"]["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_case_what_is_not_supported_is_refused(running, change, param):
    status, found = posted(running, {**HELLO, **change}, PATH)
    assert status == 400, found
    assert param is None or found["error"]["param"] == param


def test_numbers_that_json_lacks_are_refused_wherever_they_are(running):
    function = {"type": "function", "function": {"name": "f", "parameters": {"maximum": float("nan")}}}
    status, found = posted(running, {**HELLO, "tools": [function]}, PATH)
    assert (status, found["error"]["code"]) == (400, "invalid_json")


def test_a_model_without_a_template_refuses_chats():
    with serving(Scripted(), template=None) as running:
        status, found = posted(running, HELLO, PATH)
        assert status == 400 and "no chat template" in found["error"]["message"]
