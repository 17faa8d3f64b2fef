"""What the routes have in common: the server behind a request, and answers that may be left."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Annotated, Any

from fastapi import Depends, Request

from dflash.serve.errors import ApiError
from dflash.serve.reply import Choice, Part, Reply
from dflash.serve.server import Server

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}}
}
"""What the document says of replies that may be streamed."""
GONE = 499  # nobody is left to read it


async def _server(request: Request) -> Server:  # as a plain function it would run in a thread
    server: Server = request.app.state.server
    return server


Served = Annotated[Server, Depends(_server)]


def new_id(prefix: str) -> str:
    """A name for a reply."""
    return prefix + secrets.token_hex(12)


def check_model(server: Server, asked: str | None) -> None:
    """Raise ApiError unless ``asked`` is the model that is served, or nothing."""
    if asked is not None and asked != server.name:
        raise ApiError(
            404,
            f"there is no model {asked!r} here: this server has {server.name!r}",
            code="model_not_found",
            param="model",
        )


async def whole(request: Request, reply: Reply) -> list[Choice]:
    """All texts of ``reply``, unless the client leaves: then its passes stop, too."""
    answer = asyncio.ensure_future(reply.whole())
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise ApiError(GONE, "the client has left")
    finally:
        for task in (answer, leaving):
            task.cancel()
        reply.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def as_object(arguments: str) -> Any:
    """Arguments of an earlier call as templates expect them: an object, where they are one."""
    try:
        return json.loads(arguments)
    except (json.JSONDecodeError, RecursionError):
        return arguments


def origins(part: Part) -> dict[str, Any]:
    """Who made which token of a pass: the field ``origins`` of a chunk."""
    chunk = part.chunk
    return {
        "pieces": [{"text": piece.text, "source": piece.source} for piece in chunk.pieces],
        "token_ids": list(chunk.token_ids),
        "sources": list(chunk.sources),
        "drafted": chunk.drafted,
        "accepted": chunk.sources.count("draft"),
        "committed": len(chunk.token_ids),
        "state": chunk.state,
    }
