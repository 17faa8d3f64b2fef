"""The application: routes, errors and guards around one server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from dflash.engine import Engine
from dflash.serve.config import ServeConfig
from dflash.serve.errors import ApiError, as_api_error, is_anthropic
from dflash.serve.guard import Guard
from dflash.serve.naming import did_you_mean, fields_beside, routes
from dflash.serve.routes import chat, completions, docs, messages, meta, page, responses, tokens
from dflash.serve.schema.common import ErrorReply
from dflash.serve.server import Server

SEE_DOCS = " GET /docs describes every route and field."
PARTS = (meta, page, chat, completions, responses, messages, tokens, docs)


def create_app(engine: Engine, config: ServeConfig | None = None) -> FastAPI:
    """An application that serves ``engine``; whoever made the engine closes it afterwards."""
    return app_of(Server(engine, config or ServeConfig()))


def app_of(server: Server) -> FastAPI:
    """The application around ``server``, which it starts and stops."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.server.start()
        yield
        app.state.server.stop()

    app = FastAPI(
        title="dflash",
        description="A local model over HTTP, with lossless speculative decoding.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own page needs scripts from elsewhere
        redoc_url=None,
        responses={"4XX": {"model": ErrorReply}, "5XX": {"model": ErrorReply}},
    )
    app.state.server = server
    app.state.paths = ["/docs", "/openapi.json"]
    for part in PARTS:
        app.include_router(part.router)
        routes_of = [route for route in part.router.routes if isinstance(route, APIRoute)]
        app.state.paths += [route.path_format for route in routes_of if route.include_in_schema]
    app.add_middleware(Guard, config=server.config)
    if server.config.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=server.config.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("authorization", "content-type", "x-api-key"),
        )
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _not_here)
    app.add_exception_handler(Exception, _failed)
    return app


def _reply(request: Request, problem: ApiError) -> JSONResponse:
    request.app.state.server.metrics.refused(problem.status)
    body = problem.body(is_anthropic(request.url.path))
    return JSONResponse(body, problem.status, problem.headers())


async def _refused(request: Request, problem: Any) -> JSONResponse:
    return _reply(request, problem)


async def _malformed(request: Request, problem: Any) -> JSONResponse:
    """What is wrong with a request's fields: of several forms, the one that came furthest.

    A field that is missing comes last: a name that is not known may be what was written for it.
    """
    unknown = "extra_forbidden"

    last = ["missing", unknown]
    first = max(
        problem.errors(),
        key=lambda e: (len(e["loc"]), last.index(e["type"]) if e["type"] in last else len(last)),
    )
    place = list(_place(first, problem.body))
    message = f"{'.'.join(place) or 'the body'}: {first['msg']}"
    if first["type"] == "json_invalid":
        message, place = f"the body is not JSON: {first['ctx']['error']}", []
    elif len(first["loc"]) == 1:
        what = "is no JSON object" if first["type"] != "missing" else "is empty: send a JSON object"
        message, place = f"the body {what}", []
    elif first["type"] == unknown:
        hint = did_you_mean(place[-1], fields_beside(request, place))
        message = f"{'.'.join(place)} is not a field that this server knows.{hint or SEE_DOCS}"
    return _reply(request, ApiError(400, message, param=".".join(place) or None))


def _place(error: Mapping[str, Any], body: Any) -> Iterator[str]:
    """The way to a field, without the names of the forms that were tried on it."""
    missing = error["type"] == "missing"
    for part in error["loc"][1:-1] if missing else error["loc"][1:]:
        there = range(len(body)) if isinstance(body, list) else body
        if isinstance(body, list | dict) and part in there:
            body = body[part]
            yield str(part)
    if missing:
        yield str(error["loc"][-1])


async def _not_here(request: Request, problem: Any) -> JSONResponse:
    headers = {name.lower(): value for name, value in (problem.headers or {}).items()}
    message = f"{request.method} {request.url.path}: {problem.detail}"
    if problem.status_code == 404:
        message += f".{did_you_mean(request.url.path, routes(request)) or SEE_DOCS}"
    elif problem.status_code == 405:
        message += f". Its method is {headers['allow']}"
    elif problem.status_code == 400:  # what is no text, or deeper than a parser goes
        message = "the body is not JSON in UTF-8, or its objects are nested too deeply"
    reply = _reply(request, ApiError(problem.status_code, message))
    reply.headers.update(headers)  # which methods there are, say
    return reply


async def _failed(request: Request, problem: Any) -> JSONResponse:
    return _reply(request, as_api_error(problem))
