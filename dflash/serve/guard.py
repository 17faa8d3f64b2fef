"""What every request passes before a route sees it: who may call, from where, and how much.

Pure ASGI, so that streams and disconnects pass through untouched. The log has method, path, status
and time of each request, never its query, headers or text.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash.serve.config import LOOPBACK, ServeConfig
from dflash.serve.errors import ApiError, is_anthropic

BODY_SECONDS = 60  # for all of a request's body
OPEN_PATHS = {"/health", "/"}  # no key is asked for: they tell nothing and generate nothing
JSON = "application/json"
BROWSERS = ("origin", "sec-fetch-site")  # headers that programs do not send
OPEN_FOLDERS = ("/page/",)  # files of the page
log = logging.getLogger("dflash.serve")


class Guard:
    """Refuses what the config does not allow."""

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        """``app`` sees what is left."""
        self._app, self._config = app, config
        self._keys = [_digest(key) for key in config.api_keys]
        self._hosts = {*LOOPBACK, "[::1]", *config.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the lifespan."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, status = time.monotonic(), [0]

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            await send(message)

        try:
            self._check(scope)
            await self._app(_as_json(scope), self._limited(receive), sending)
        except ApiError as problem:
            body = problem.body(is_anthropic(scope["path"]))
            await JSONResponse(body, problem.status, problem.headers())(scope, receive, sending)
        finally:
            took = time.monotonic() - began
            log.info("%s %r %d %.3f s", scope["method"], scope["path"], status[0], took)
        return None

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = _host(headers.get("host", ""))
        if self._config.only_here and host not in self._hosts:
            raise ApiError(403, f"host {host!r} is not served here (--allowed-host adds names)")
        path = scope["path"]
        is_open = path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)
        if self._keys and not is_open and scope["method"] != "OPTIONS" and not self._knows(headers):
            raise ApiError(401, "no valid API key was sent", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._config.most_body:
            raise ApiError(413, self._too_large())

    def _knows(self, headers: Headers) -> bool:
        """Whether a valid key came. Each known key is compared, in constant time."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        offered = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(offered)
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        return True in matches

    def _limited(self, receive: Receive) -> Receive:
        """``receive``, which ends a body that is too long, or does not end."""
        seen, complete, deadline = 0, False, time.monotonic() + BODY_SECONDS

        async def receiving() -> Message:
            nonlocal seen, complete
            if complete:
                return await receive()
            message = await _in_time(receive, deadline)
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                complete = not message.get("more_body", False)
                if seen > self._config.most_body:
                    raise HTTPException(413, self._too_large())
            return message

        return receiving

    def _too_large(self) -> str:
        return f"a request may have {self._config.most_body} bytes"


def _host(header: str) -> str:
    """The name in a Host header; the header itself where it holds none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return header


def _as_json(scope: Scope) -> Scope:
    """``scope`` with a body that is JSON whatever its header says, and HEAD as GET.

    Plain ``curl -d`` sends JSON as a form. A web page of another origin can send one, too, without
    asking whether it may: what comes from a browser has to say that it is JSON. Raises ApiError.
    """
    if scope["method"] == "HEAD":  # the server below keeps the body back
        return {**scope, "method": "GET"}
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if scope["method"] != "POST" or kind == JSON or kind.endswith("+json"):
        return scope
    if any(name in headers for name in BROWSERS):
        raise ApiError(
            415, f"a web page has to send its body as {JSON}, and this one came as {kind or 'none'}"
        )
    others = [pair for pair in scope["headers"] if pair[0].lower() != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", JSON.encode())]}


async def _in_time(receive: Callable[[], Awaitable[Message]], deadline: float) -> Message:
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await receive()
    except TimeoutError:
        raise HTTPException(408, "the request's body did not come to its end") from None


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
