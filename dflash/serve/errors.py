"""Failures as clients see them: one status, one message, in the shape of the API they called."""

from __future__ import annotations

import logging
from typing import Any

from dflash.errors import (
    ConfigError,
    DFlashError,
    EngineClosed,
    MissingBackend,
    OutOfMemory,
    PromptError,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
log = logging.getLogger("dflash.serve")


class ApiError(Exception):
    """A request that gets no answer, and why. ``param`` names the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """``retry_after`` in seconds: when to ask again; None = asking again changes nothing."""
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after

    @property
    def kind(self) -> str:
        """The word for it that both APIs use."""
        return _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "api_error"
        )

    def headers(self) -> dict[str, str]:
        """Whether and when clients should try again, in the words their libraries read."""
        if self.retry_after is None:
            return {"x-should-retry": "false"}
        return {"retry-after": str(self.retry_after), "x-should-retry": "true"}

    def body(self, anthropic: bool = False) -> dict[str, Any]:
        """The JSON object of this error, as OpenAI's clients or as Anthropic's read it."""
        if anthropic:
            return {"type": "error", "error": {"type": self.kind, "message": str(self)}}
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def is_anthropic(path: str) -> bool:
    """Whether clients at ``path`` read errors in Anthropic's shape."""
    return path.startswith("/v1/messages")


def as_api_error(problem: BaseException) -> ApiError:
    """What a client is told of ``problem``. A fault of ours is logged in full and named briefly."""
    if isinstance(problem, ApiError):
        return problem
    if isinstance(problem, PromptError):
        long = "context" in str(problem)
        return ApiError(400, str(problem), code="context_length_exceeded" if long else None)
    if isinstance(problem, ConfigError):
        return ApiError(400, str(problem))
    if isinstance(problem, MissingBackend):
        return ApiError(501, f"this server cannot do that: {problem}")
    if isinstance(problem, OutOfMemory):
        return ApiError(503, str(problem), code="out_of_memory", retry_after=5)
    if isinstance(problem, EngineClosed):
        return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)
    if not isinstance(problem, DFlashError):
        log.error("a request failed", exc_info=problem)
    return ApiError(500, "the server failed while it worked on this request; its log says more")
