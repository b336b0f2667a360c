"""`axcore serve` in a process."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys

import openai
import pytest

from axcore import functional
from axcore.config import AxcoreError
from axcore.train import save_model
from axcore.train.data import ByteTokenizer
from axcore_serve.command import main

from .support import KEY, TEMPLATE, tiny_model


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--max-queue", "-1"], "--max-queue must be at least 0, not -1"),
        (["--timeout", "nan"], "--timeout must be above 0 and finite, not nan"),
        (["--drain-timeout", "0"], "--drain-timeout must be above 0 and finite, not 0"),
        (["--max-body-mib", "inf"], "--max-body-mib must be above 0 and finite, not inf"),
        (["--max-rows", "0"], "--max-rows must be at least 1"),
        (["--api-keys", "missing"], "--api-keys missing: "),
        (["--api-keys", os.devnull], "has no keys"),
        (["--chat-template", "missing"], "--chat-template missing: "),
        (["--adapter", "sql"], "--adapter sql: must have the form NAME=FOLDER"),
        (["--adapter", "a=x", "--adapter", "a=y"], "--adapter a=y: another --adapter has the name 'a'"),
        (
            ["--adapter", "no-such-folder=x"],
            "the model has the name 'no-such-folder', too. Choose another, or set --name",
        ),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1:8000"),
        (["--port", "70000"], "cannot listen on 127.0.0.1:70000"),
    ],
)
def test_case_bad_arguments_are_named_before_anything_loads(arguments, text):
    with pytest.raises(AxcoreError, match=re.escape(text)):
        main(["no-such-folder", *arguments])


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AxcoreError, match=f"cannot listen on 127.0.0.1:{port}"):
            main(["no-such-folder", "--port", str(port)])


@pytest.mark.long
def test_a_model_folder_is_served_until_sigterm(tmp_path):
    model = tiny_model()
    _, params, state = functional(model)
    save_model(tmp_path / "model", model.config, params, state, tokenizer=ByteTokenizer.Config())
    (tmp_path / "keys").write_text(f"{KEY}\n")
    (tmp_path / "template").write_text(TEMPLATE)
    flags = ["--port", "0", "--name", "mine", "--max-len", "400", "--max-rows", "2", "--no-warm-up"]
    files = ["--api-keys", tmp_path / "keys", "--chat-template", tmp_path / "template", "--cache", "contiguous"]
    command = [sys.executable, "-m", "axcore", "serve", tmp_path / "model", *flags, *files]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with contextlib.ExitStack() as held:
        held.callback(process.kill)
        line = next(line for line in process.stderr if line.startswith("serving "))
        address = re.fullmatch(r"serving mine at (http://127\.0\.0\.1:\d+/v1)\n", line)[1]
        client = held.enter_context(openai.OpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=120))
        messages = [{"role": "user", "content": "hi"}]
        length = 300
        stream = client.chat.completions.create(
            model="mine", messages=messages, max_tokens=length, stream=True, stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(stream)
        process.send_signal(signal.SIGTERM)
        *_, last = stream
        assert last.usage.completion_tokens == length
        assert process.wait(60) == 0
