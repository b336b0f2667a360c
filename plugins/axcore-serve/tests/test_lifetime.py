"""Queue limits, draining, timeouts, clients that leave, and engines that fail."""

import contextlib
import http.client
import json
import signal
import socket
import threading

import openai
import pytest

from axcore_serve import app
from axcore_serve.gate import Limits

from .scripted import Scripted
from .support import KEY, posted, raw, serving, wait_until

GOOD = {"model": "tiny", "prompt": "a", "max_tokens": 4}
SLOW = Limits(max_samples=3, request_s=30.0)


@contextlib.contextmanager
def in_thread(call):
    """Runs `call` meanwhile. Yields a list that gets its result or its exception."""
    found = []

    def run():
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield found
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def held():
    """A server whose engine waits for `Job.step`."""
    with serving(Scripted(b"abcd", holds=True), SLOW) as running:
        yield running


def send(running, body, path="/v1/completions"):
    """A socket on which a request was sent."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def test_a_full_queue_refuses_with_a_time_to_retry(held):
    with send(held, {**GOOD, "n": 2}), held.client() as client:
        wait_until(lambda: held.service.gate.num_samples == 2)
        status, headers, content = raw(held, json.dumps({**GOOD, "n": 2}).encode())
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(content)["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            client.completions.create(**GOOD, n=2)
        with in_thread(lambda: posted(held, GOOD)) as found:  # one more fits
            wait_until(lambda: len(held.engine.jobs) == 3)
            held.engine.jobs[2].step(4)
        assert found[0][0] == 200
    wait_until(lambda: held.service.gate.num_samples == 0)
    assert len(held.engine.jobs) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_samples(held, stream):
    connection = send(held, {**GOOD, "stream": stream, "n": 2})
    wait_until(lambda: len(held.engine.jobs) == 2)
    held.engine.jobs[0].step()
    if stream:
        assert connection.recv(1)
    connection.close()
    wait_until(lambda: all(job.is_cancelled for job in held.engine.jobs))
    wait_until(lambda: held.service.gate.num_samples == 0)
    assert "axcore_http_disconnects_total 1.0" in raw(held, None, path="/metrics", method="GET")[2].decode()
    held.engine.holds = False
    assert posted(held, GOOD)[1]["choices"][0]["text"] == "abcd"


def test_the_client_of_openai_cancels_a_stream(held):
    with held.client() as client:
        stream = client.completions.create(**GOOD, stream=True)
        wait_until(lambda: held.engine.jobs)
        held.engine.jobs[0].step()
        assert next(stream).choices[0].text == "a"
        stream.close()
        wait_until(lambda: held.engine.jobs[0].is_cancelled)


def test_a_client_that_leaves_while_sending_harms_nobody(held):
    with socket.create_connection(("127.0.0.1", held.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        wait_until(lambda: held.service.gate.num_requests == 1)
    wait_until(lambda: held.service.gate.num_requests == 0)
    assert not held.engine.jobs


def test_a_signal_drains(held):
    with held.client() as client:
        stream = client.completions.create(**GOOD, stream=True)
        wait_until(lambda: held.engine.jobs)
        held.engine.jobs[0].step()
        assert next(stream).choices[0].text == "a"
        held.server.handle_exit(signal.SIGTERM, None)
        status, headers, content = raw(held, json.dumps(GOOD).encode())
        assert (status, headers["retry-after"]) == (503, "5")
        assert json.loads(content)["error"]["type"] == "server_error"
        assert raw(held, None, path="/health", method="GET")[0] == 503
        held.thread.join(0.4)
        assert held.thread.is_alive()
        held.engine.jobs[0].step(3)
        assert "".join(chunk.choices[0].text for chunk in stream) == "bcd"
    held.thread.join(10)
    assert not held.thread.is_alive() and not held.engine.jobs[0].is_cancelled
    with pytest.raises(ConnectionError):
        raw(held, None, path="/health", method="GET")


@pytest.mark.long
def test_draining_ends_after_its_time():
    with serving(Scripted(holds=True), Limits(max_samples=1, drain_s=0.2)) as running, send(running, GOOD):
        wait_until(lambda: running.engine.jobs)
        running.server.handle_exit(signal.SIGTERM, None)
        running.thread.join(10)
        assert not running.thread.is_alive() and running.engine.jobs[0].is_cancelled


@pytest.mark.long
def test_a_second_signal_ends_at_once(held):
    with send(held, GOOD):
        wait_until(lambda: held.engine.jobs)
        held.server.handle_exit(signal.SIGTERM, None)
        held.server.handle_exit(signal.SIGTERM, None)
        held.thread.join(10)
        assert not held.thread.is_alive()


def test_requests_that_take_too_long_end():
    with serving(Scripted(b"ab", holds=True), Limits(max_samples=4, request_s=0.3)) as running:
        status, found = posted(running, GOOD)
        assert (status, found["error"]["code"]) == (504, "timeout") and running.engine.jobs[0].is_cancelled
        with running.client() as client, pytest.raises(openai.APIError, match=r"longer than 0\.3 s"):
            list(client.completions.create(**GOOD, stream=True))
        wait_until(lambda: running.engine.jobs[1].is_cancelled)


@pytest.mark.long
def test_a_client_that_does_not_read_counts_as_gone(monkeypatch):
    monkeypatch.setattr(app, "SEND_S", 0.5)
    name = "x" * 4000  # is in every chunk, so the chunks exceed all buffers
    with serving(Scripted(b"a", max_len=10_000), Limits(max_samples=4, request_s=1.0), name=name) as running:
        with send(running, {**GOOD, "model": name, "stream": True, "max_tokens": 5000}):
            wait_until(lambda: running.service.gate.num_samples == 1)
            wait_until(lambda: running.service.gate.num_samples == 0)
        running.engine.ids = list(b"abcd")
        assert posted(running, {**GOOD, "model": name})[1]["choices"][0]["text"] == "abcd"


def test_an_engine_that_fails_answers_with_an_error(held):
    with in_thread(lambda: posted(held, {**GOOD, "n": 2})) as found:
        wait_until(lambda: len(held.engine.jobs) == 2)
        held.engine.jobs[1].fail("the engine failed: boom")
    status, answer = found[0]
    assert (status, answer["error"]["type"]) == (500, "server_error") and "boom" in answer["error"]["message"]
    wait_until(lambda: held.engine.jobs[0].is_cancelled)
    with held.client() as client:
        stream = client.completions.create(**GOOD, stream=True)
        wait_until(lambda: len(held.engine.jobs) == 3)
        held.engine.jobs[2].step()
        next(stream)
        held.engine.jobs[2].fail("the engine failed: boom")
        with pytest.raises(openai.APIError, match="boom"):  # an event, since the status was sent
            next(stream)
    assert raw(held, None, path="/health", method="GET")[0] == 200
    held.engine.is_closed = True
    assert posted(held, GOOD)[0] == 500
    assert raw(held, None, path="/health", method="GET")[0] == 503


def test_connections_are_kept(running):
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
    with contextlib.closing(connection):
        for stream in (False, True, False):
            connection.request("POST", "/v1/completions", json.dumps({**GOOD, "stream": stream}))
            response = connection.getresponse()
            assert response.status == 200 and response.read()
    assert "axcore_http_disconnects_total 0.0" in raw(running, None, path="/metrics", method="GET")[2].decode()


REFUSED = {
    "no key": ("POST", "/v1/completions", b"{}", 401, {}),
    "no key, large": ("POST", "/v1/completions", b"x" * 100_000, 401, {}),
    "too large": ("POST", "/v1/completions", b"x" * 5000, 413, {"Authorization": f"Bearer {KEY}"}),
    "not JSON": ("POST", "/v1/completions", b"{", 400, {"Authorization": f"Bearer {KEY}"}),
    "no path": ("POST", "/v2", b"x" * 5000, 404, {}),
    "no method": ("PUT", "/health", b"x" * 5000, 405, {}),
    "options": ("OPTIONS", "/v1/completions", None, 405, {}),
    "head": ("HEAD", "/v1/models", None, 401, {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_connection_serves_on_after_an_error(case):
    method, path, body, expected, headers = REFUSED[case]
    with serving(Scripted(b"ok"), Limits(max_samples=4, max_body_bytes=1000), keys=[KEY]) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            sock, response = connection.sock, connection.getresponse()
            content = response.read()
            assert response.status == expected and (method == "HEAD" or json.loads(content)["error"]["message"])
            assert (response.getheader("Allow") is not None) == (expected == 405)
            connection.request("POST", "/v1/completions", json.dumps(GOOD), {"Authorization": f"Bearer {KEY}"})
            assert json.loads(connection.getresponse().read())["choices"][0]["text"] == "okok"
            assert connection.sock is sock


def test_bytes_that_are_not_http_are_refused(running):
    for content in (b"\x00\x01GARBAGE\r\n\r\n", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", running.port), timeout=20) as connection:
            connection.sendall(content)
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert posted(running, GOOD)[0] == 200


def test_requests_whose_bodies_arrive_count_towards_the_queue(held):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"
    with contextlib.ExitStack() as stack:
        for _ in range(SLOW.max_samples):
            stack.enter_context(socket.create_connection(("127.0.0.1", held.port))).sendall(head)
        wait_until(lambda: held.service.gate.num_requests == SLOW.max_samples)
        status, found = posted(held, GOOD)
        assert (status, found["error"]["code"]) == (429, "queue_full")
        assert "3 requests are in progress" in found["error"]["message"]
    wait_until(lambda: held.service.gate.num_requests == 0)


def test_metrics_count(held):
    with in_thread(lambda: posted(held, GOOD)):
        wait_until(lambda: held.engine.jobs)
        held.engine.jobs[0].step(4)
    posted(held, {**GOOD, "n": 0})
    status, headers, content = raw(held, None, path="/metrics", method="GET")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    lines = content.decode().splitlines()
    for line in (
        'axcore_http_responses_total{route="/v1/completions",status="200"} 1.0',
        'axcore_http_responses_total{route="/v1/completions",status="400"} 1.0',
        "axcore_time_to_first_token_seconds_count 1.0",
        "axcore_inter_token_latency_seconds_count 3.0",
        "axcore_samples_running 0.0",
        "axcore_samples_waiting 0.0",
        "axcore_saved_states 4.0",
        "axcore_preemptions_total 3.0",
        "axcore_steps_total 5.0",
        "axcore_generated_tokens_total 7.0",
        "axcore_prompt_tokens_total 11.0",
        "axcore_cached_prompt_tokens_total 2.0",
        "axcore_programs_compiled_total 13.0",
    ):
        assert line in lines, content.decode()


def test_the_page_names_the_model_and_needs_no_other_host():
    with serving(Scripted(), name="</script><b>") as running:
        status, headers, content = raw(running, None, path="/", method="GET")
    page = content.decode()
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert "MODEL_NAME" not in page and "</script><b>" not in page and '"\\u003c/script>\\u003cb>"' in page
    assert "http://" not in page and "https://" not in page


def test_an_unexpected_exception_is_an_error_of_one_request(monkeypatch):
    with serving(Scripted(b"abcd")) as running:
        with monkeypatch.context() as patch:
            patch.setattr(running.engine, "check", lambda _: 1 / 0)
            status, found = posted(running, GOOD)
            assert (status, found["error"]["type"]) == (500, "server_error")
            assert "ZeroDivisionError" in found["error"]["message"]
        assert posted(running, GOOD)[1]["choices"][0]["text"] == "abcd"
        assert running.service.gate.num_requests == 0
