"""An HTTP server that finishes its requests before it ends."""

from __future__ import annotations

import socket
from types import FrameType

import uvicorn

from axcore.config import AxcoreError
from axcore_serve.app import Service
from axcore_serve.gate import Gate


class DrainingServer(uvicorn.Server):
    """After the first SIGTERM or SIGINT, new requests are refused and the server ends with the last running one. After
    the second signal, it ends at once.

    Args:
        service: the endpoints.
        close_s: seconds that connections have to close at the end.
    """

    def __init__(self, service: Service, close_s: float = 2.0):
        super().__init__(
            uvicorn.Config(
                service.app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=max(1, round(close_s)),
            )
        )
        self._gate: Gate = service.gate

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._gate.is_draining:
            self.should_exit = self.force_exit = True
        else:
            self._gate.drain()

    async def on_tick(self, counter: int) -> bool:
        if self._gate.is_drained:
            self.should_exit = True
        return await super().on_tick(counter)


def listening(host: str, port: int) -> socket.socket:
    """A socket that accepts connections, which wait until a server runs.

    Raises:
        AxcoreError: the address is in use or does not exist.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise AxcoreError(f"cannot listen on {host}:{port}: {error}. Choose another --host or --port") from error
