"""Errors as the API of OpenAI describes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from axcore.config import AxcoreError, ConfigError, did_you_mean

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""The `type` of an error by its status. Other statuses below 500 are invalid requests."""


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: the HTTP status.
        message: what was given, what is required and what to do.
        param: the parameter at fault, such as `messages.0.role`; None: no single one.
        code: a name for programs, such as `model_not_found`.
        headers: headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def of_engine(error: AxcoreError) -> ApiError:
    """The error of an engine that failed or was closed, whose logits are not finite, or that has lost an adapter."""
    if isinstance(error, ConfigError) and str(error).startswith("request.adapter"):
        return of_options(error, {"adapter": "model"})
    return ApiError(500, str(error), code="engine_error")


def of_options(error: AxcoreError, names: Mapping[str, str]) -> ApiError:
    """An error of a `Request` or its `SamplingOptions`, in terms of the API.

    Args:
        error: its message names fields as `sampling.top_k` and `request.ids`.
        names: the parameters whose names differ from those of the fields.
    """
    text = re.sub(r"\b(?:sampling|request)\.(\w+)", lambda match: names.get(match[1], match[1]), str(error))
    path = re.match(r"(?:sampling|request)\.(\w+)", str(error))
    param = names.get(path[1], path[1]) if path else None
    if path and path[1] == "adapter":
        return ApiError(404, text, param=param, code="model_not_found")
    is_length = " leaves no room " in text or " exceed " in text
    return ApiError(400, text, param=param, code="context_length_exceeded" if is_length else None)


def of_body(error: ValidationError, known: Mapping[str, Any]) -> ApiError:
    """The first error of a body.

    Args:
        known: the parameters of the endpoint.
    """
    found = error.errors(include_url=False)[0]
    # pydantic also names the arm of a union in a location
    where = ".".join(str(part) for part in found["loc"] if isinstance(part, int) or re.fullmatch(r"\w+", part))
    if found["type"] == "extra_forbidden":
        near = did_you_mean(where, known) if "." not in where else ""
        return ApiError(400, f"{where} is not a parameter of this endpoint.{near or ' Omit it'}", param=where)
    if found["type"] == "missing":
        return ApiError(400, f"{where} is required", param=where)
    message = found["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
    return ApiError(400, f"{where}={_shown(found['input'])}: {message}", param=where or None)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an int with thousands of digits
        text = "a number with too many digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
