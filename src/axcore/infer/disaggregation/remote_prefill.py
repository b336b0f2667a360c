"""Disaggregated prefill between processes, over TCP."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from axcore.config import AxcoreError, ConfigError
from axcore.infer.disaggregation.handover import DeliverHandover, Handover, Prefill
from axcore.infer.disaggregation.handover_file import read_handover, write_handover
from axcore.infer.grammar import Grammar
from axcore.infer.requests import Piece, Request, SamplingOptions

_POLL_S = 0.2  # how often a server looks whether the client of a request is gone


class PrefillServer:
    """Computes prompts for the engines of other processes, which reach it by `RemotePrefill`.

    ```python
    with PrefillServer(engine, ("10.0.0.5", 7000)):
        ...
    ```

    It neither encrypts nor authenticates: bind it to a private network.

    Args:
        engine: computes the prompts.
        address: host and port to listen on; port 0 chooses a free one.

    Attributes:
        address: the host and the port.
    """

    def __init__(self, engine: Prefill, address: tuple[str, int] = ("127.0.0.1", 0)):
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                connection: socket.socket = self.request
                with (
                    contextlib.suppress(OSError),  # the client is gone
                    connection.makefile("rb") as source,
                    connection.makefile("wb") as target,
                ):
                    _serve(engine, connection, source, target)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

        self._server = Server(address, Handler)
        host, port = self._server.server_address[:2]
        self.address: tuple[str, int] = (str(host), int(port))
        self._thread = threading.Thread(target=self._server.serve_forever, name="axcore-prefill", daemon=True)
        self._thread.start()

    def __enter__(self) -> PrefillServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes no more requests. The engine remains open."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _serve(engine: Prefill, connection: socket.socket, source: BinaryIO, target: BinaryIO) -> None:
    """Answers one request: a line of JSON, then the handover if there was no error."""
    try:
        asked = json.loads(source.readline())
        request, sample = _unpacked(asked["request"]), int(asked["sample"])
        found: queue.SimpleQueue[Handover | Piece | AxcoreError] = queue.SimpleQueue()
        cancel = engine.export(request, found.put, sample=sample)
    except AxcoreError as error:
        _answer(target, error=str(error), is_config=isinstance(error, ConfigError))
        return
    except (KeyError, TypeError, ValueError) as error:
        _answer(target, error=f"the request is not valid: {error!r}", is_config=False)
        return
    while True:
        try:
            result = found.get(timeout=_POLL_S)
            break
        except queue.Empty:
            if _is_gone(connection):
                cancel()
    if isinstance(result, Handover):
        _answer(target)
        write_handover(result, target)
    elif isinstance(result, AxcoreError):
        _answer(target, error=str(result), is_config=isinstance(result, ConfigError))


def _answer(target: BinaryIO, **fields: object) -> None:
    target.write(json.dumps(fields).encode() + b"\n")
    target.flush()


def _is_gone(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


class RemotePrefill:
    """The prefill of an engine in another process, which runs a `PrefillServer`.

    Each request has its own connection and thread. If the other process ends, its requests get an error.

    Args:
        address: host and port of the server.
        timeout_s: the largest number of seconds without an answer, or between two parts of it; None: no limit.
    """

    def __init__(self, address: tuple[str, int], *, timeout_s: float | None = None):
        self.address, self._timeout_s = address, timeout_s

    def export(self, request: Request, deliver: DeliverHandover, *, sample: int = 0) -> Callable[[], None]:
        """See `Engine.export`. Errors of the other engine are delivered."""
        call = _Call(self.address, self._timeout_s, deliver)
        text = json.dumps({"request": _packed(request), "sample": sample}).encode() + b"\n"
        threading.Thread(target=call.run, args=(text,), name="axcore-remote-prefill", daemon=True).start()
        return call.cancel


class _Call:
    """One request to a server."""

    def __init__(self, address: tuple[str, int], timeout_s: float | None, deliver: DeliverHandover):
        self._address, self._timeout_s, self._deliver = address, timeout_s, deliver
        self._lock, self._is_cancelled = threading.Lock(), False
        self._connection: socket.socket | None = None

    def run(self, text: bytes) -> None:
        try:
            found: Handover | AxcoreError = self._answer(text)
        except (AxcoreError, OSError, ValueError) as error:
            found = AxcoreError(f"the prefill engine at {self._address[0]}:{self._address[1]}: {error}")
            found.__cause__ = error
        with self._lock:
            is_cancelled = self._is_cancelled
        self._deliver(Piece((), finish_reason="cancelled") if is_cancelled else found)

    def _answer(self, text: bytes) -> Handover | AxcoreError:
        try:
            connection = socket.create_connection(self._address, timeout=self._timeout_s)
        except OSError as error:
            raise AxcoreError(f"{error}. Start a PrefillServer there, or correct the address") from error
        with connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            with self._lock:
                self._connection = connection
                if self._is_cancelled:
                    raise AxcoreError("cancelled")
            connection.sendall(text)
            with connection.makefile("rb") as file:
                line = file.readline()
                if not line:
                    raise AxcoreError(
                        "the connection was closed before the prompt was computed. Send the request again"
                    )
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    kind = ConfigError if answer.get("is_config") else AxcoreError
                    return kind(answer["error"])
                return read_handover(file)

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled, connection = True, self._connection
        if connection is not None:
            with contextlib.suppress(OSError):  # it was closed
                connection.shutdown(socket.SHUT_RDWR)


def _packed(request: Request) -> dict[str, Any]:
    """A request as JSON. Keys of objects are strings, so `logit_bias` is a list of pairs."""
    fields = dataclasses.asdict(request)
    fields["options"]["logit_bias"] = list(request.options.logit_bias.items())
    return fields


def _unpacked(fields: dict[str, Any]) -> Request:
    options = dict(fields["options"])
    options |= {name: tuple(options[name]) for name in ("stop", "stop_token_ids")}
    options["logit_bias"] = {int(token): value for token, value in options["logit_bias"]}
    options["grammar"] = None if options["grammar"] is None else Grammar(**options["grammar"])
    return Request(**fields | {"ids": tuple(fields["ids"]), "options": SamplingOptions(**options)})
