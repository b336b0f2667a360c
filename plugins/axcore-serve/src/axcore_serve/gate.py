"""Which requests are accepted: limits, keys and draining."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import time
from collections.abc import Collection, Iterator

from axcore_serve.errors import ApiError


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a server.

    Attributes:
        max_samples: samples that run or wait at the same time, and requests in progress, also while their bodies
            arrive.
        max_body_bytes: the size of a body.
        request_s: seconds from a request to the end of its answer.
        body_s: seconds in which a body must arrive.
        drain_s: seconds that running requests have after SIGTERM.
    """

    max_samples: int
    max_body_bytes: int = 4 << 20
    request_s: float = 600.0
    body_s: float = 30.0
    drain_s: float = 60.0


class Gate:
    """Counts the requests in progress, and refuses those that exceed a limit or arrive while the server drains.

    Attributes:
        num_requests: the requests in progress.
        num_samples: their samples.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self.num_requests = self.num_samples = 0
        self._drain_until: float | None = None

    @property
    def is_draining(self) -> bool:
        return self._drain_until is not None

    @property
    def is_drained(self) -> bool:
        """Whether the server drains, and has nothing left to do or no more time."""
        return self._drain_until is not None and (not self.num_requests or time.monotonic() > self._drain_until)

    def drain(self) -> None:
        """Refuses new requests from now on."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._limits.drain_s

    def check(self) -> None:
        """
        Raises:
            ApiError: the server drains.
        """
        if self.is_draining:
            raise ApiError(
                503, "the server is shutting down. Retry later", code="shutting_down", headers={"Retry-After": "5"}
            )

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request while it is in progress.

        Raises:
            ApiError: the server drains, or too many requests are in progress.
        """
        self.check()
        if self.num_requests >= self._limits.max_samples:  # each needs room for at least one sample
            raise self._full(f"{self.num_requests} requests are in progress")
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    @contextlib.contextmanager
    def samples(self, count: int, param: str) -> Iterator[None]:
        """Counts the samples of a request while they are in progress.

        Args:
            count: the number of samples.
            param: the parameter that determines it.

        Raises:
            ApiError: too many samples are in progress, or the request alone has too many.
        """
        most = self._limits.max_samples
        if count > most:
            raise ApiError(
                400, f"{param}: the request has {count} samples, must have at most {most}. Send several", param=param
            )
        if self.num_samples + count > most:
            raise self._full(f"{self.num_samples} samples run or wait")
        self.num_samples += count
        try:
            yield
        finally:
            self.num_samples -= count

    def _full(self, found: str) -> ApiError:
        return ApiError(
            429,
            f"{found}, and the limit is {self._limits.max_samples}. Retry later",
            code="queue_full",
            headers={"Retry-After": "1"},
        )


class Keys:
    """The API keys of a server.

    Args:
        keys: the keys; empty: every request is accepted.
    """

    def __init__(self, keys: Collection[str]):
        self._digests = [_digest(key) for key in keys]

    def check(self, authorization: str | None) -> None:
        """Checks the header `Authorization`, in a time that does not depend on the keys.

        Raises:
            ApiError: the header has no key, or a wrong one.
        """
        if not self._digests:
            return
        kind, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, each) for each in self._digests]
        if kind.lower() != "bearer" or not any(matches):
            what = "the API key is not valid" if authorization else "an API key is required"
            raise ApiError(
                401,
                f"{what}. Send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
