"""Servers in a thread, small models, and requests."""

import asyncio
import contextlib
import http.client
import json
import threading
import time

import openai

import axcore as ax
from axcore.infer import Engine
from axcore.nn import Attention, CausalLM, FeedForward, Normal, Repeat, TransformerLayer
from axcore.train.data import ByteTokenizer
from axcore_paged_kv.cache import PagedCache
from axcore_serve.app import Service
from axcore_serve.gate import Limits
from axcore_serve.server import DrainingServer, listening
from axcore_serve.templates import ChatTemplate

KEY = "sk-right"
TEMPLATE = """\
{%- if tools %}tools: {{ tools | tojson }} as <tool_call>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" and loop.first %}{{ raise_exception("a tool must not speak first") }}{% endif %}
{{- message.role }}: {{ message.content }}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""


def tiny_model():
    """A model of bytes whose greedy text varies."""
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=2, num_kv_heads=1), ffn=FeedForward.Config(hidden_dim=24)
    )
    vocab_size = ByteTokenizer.Config().build().vocab_size
    cfg = CausalLM.Config(vocab_size=vocab_size, dim=16, decoder=Repeat.Config(num_layers=1, layers=layer))
    cfg = ax.select(cfg, "embedding").set(init=Normal(stddev=1.0))
    return ax.pipe(cfg, ax.use("rope")).build(rngs=ax.Rngs(0))


def tiny_engine(tokenizer=None, **fields):
    tokenizer = tokenizer or ByteTokenizer.Config().build()
    cache = PagedCache.Config(page_size=8, num_pages=80)
    cfg = Engine.Config(**{"max_len": 160, "max_rows": 4, "step_tokens": 64, "cache": cache, **fields})
    return cfg.build(tiny_model(), tokenizer, eos_ids=tokenizer.eos_ids)


class Running:
    """A server in a thread."""

    def __init__(self, engine, limits=None, keys=(), template=TEMPLATE, name="tiny", **options):
        self.engine = engine
        parsed = None if template is None else ChatTemplate(template, {"bos_token": "<s>"})
        limits = limits or Limits(max_samples=64)
        self.service = Service(engine, name, limits, keys=keys, template=parsed, **options)
        self.server = DrainingServer(self.service, close_s=1.0)
        self.socket = listening("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(
            target=lambda: asyncio.run(self.server.serve(sockets=[self.socket])), daemon=True
        )
        self.thread.start()

    def client(self, key="none", **options):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **options)

    def aclient(self, key="none"):
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def stop(self):
        self.server.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive(), "the server did not end"


@contextlib.contextmanager
def serving(engine, *args, **options):
    running = Running(engine, *args, **options)
    try:
        yield running
    finally:
        running.stop()


def raw(running, body, *, path="/v1/completions", method="POST", headers=None, chunked=False):
    """Sends bytes, and returns status, headers and the body of the response."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers or {}, encode_chunked=chunked)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()


def posted(running, body, path="/v1/completions", **headers):
    """Sends JSON, and returns the status and the JSON of the response."""
    status, _, content = raw(running, json.dumps(body).encode(), path=path, headers=headers)
    return status, json.loads(content)


def events(running, body, path="/v1/completions"):
    """The data of the events of a stream."""
    status, headers, content = raw(running, json.dumps({"stream": True, **body}).encode(), path=path)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8"), content
    blocks = content.decode().split("\n\n")
    assert blocks.pop() == "" and all(block.startswith("data: ") for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    assert data.pop() == "[DONE]"
    return [json.loads(each) for each in data]


def wait_until(condition, seconds=20.0):
    """Waits for a condition, and fails if it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
