"""``POST /v1/completions``: text continued as it stands, whole or as it comes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import ServerSentEvent

from dflash.serve import sse
from dflash.serve.errors import ApiError
from dflash.serve.reply import Choice, Part, Reply
from dflash.serve.routes.shared import STREAMED, Served, check_model, new_id, origins, whole
from dflash.serve.schema.common import StreamOptions, without_none
from dflash.serve.schema.completions import DEFAULT_TOKENS, MOST_TEXTS, CompletionRequest
from dflash.serve.server import Order, Server
from dflash.spelling import Notes

router = APIRouter()


@router.post("/v1/completions", responses=STREAMED)
async def completions(body: CompletionRequest, request: Request, server: Served) -> Response:
    """Continue one text or several."""
    body.check()
    check_model(server, body.model)
    reply = await server.submit(lambda: order_of(body))
    if body.stream:
        return sse.answer(Stream(body, server, reply).frames(), reply.cancel)
    choices = await whole(request, reply)
    return JSONResponse(
        {
            **_head(server),
            "choices": [_choice(i, choice, body, server) for i, choice in enumerate(choices)],
            "usage": reply.usage(),
            "metrics": reply.metrics(),
        }
    )


def order_of(body: CompletionRequest) -> Order:
    """``body`` in the engine's words. Raises ApiError."""
    prompts = body.prompts()
    if not prompts or len(prompts) * (body.n or 1) > MOST_TEXTS:
        raise ApiError(
            400, f"prompts x n must be between 1 and {MOST_TEXTS}", code=None, param="prompt"
        )
    held = body.structured_outputs.held() if body.structured_outputs else {}
    more = {
        "max_tokens": body.max_tokens,
        "echo": body.echo,
        "logprobs": body.logprobs,
        "n": body.n,
        "stop": body.stop,
    }
    return Order(
        prompts=prompts,
        options=body.chosen() | held | without_none(more),
        speculative=body.speculative,
        seconds=body.deadline,
        default_tokens=DEFAULT_TOKENS,
    )


def _head(server: Server) -> dict[str, Any]:
    return {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": server.name,
    }


def _choice(index: int, choice: Choice, body: CompletionRequest, server: Server) -> dict[str, Any]:
    notes = None
    if body.logprobs is not None:
        notes = Notes(server.spelling, choice.echoed).of(choice.logprobs)
    return {
        "index": index,
        "text": choice.content,
        "logprobs": notes,
        "finish_reason": choice.finish_reason,
        "token_ids": choice.token_ids,
    }


class Stream:
    """The frames of one streamed reply."""

    def __init__(self, body: CompletionRequest, server: Server, reply: Reply) -> None:
        """Sends nothing yet."""
        self._body, self._server, self._reply = body, server, reply
        self._options = body.stream_options or StreamOptions()
        self._head = _head(server)
        self._notes: dict[int, Notes] = {}

    async def frames(self) -> AsyncIterator[ServerSentEvent]:
        """What each pass adds, then what it cost."""
        async for part in self._reply.parts():
            if part.chunk.token_ids or part.chunk.finish_reason:
                yield sse.frame(self._frame(part))
        if self._options.include_usage:
            last = {"choices": [], "usage": self._reply.usage(), "metrics": self._reply.metrics()}
            yield sse.frame({**self._head, **last})
        yield sse.DONE

    def _frame(self, part: Part) -> dict[str, Any]:
        index, chunk = part.chunk.index, part.chunk
        choice: dict[str, Any] = {
            "index": index,
            "text": "".join(delta.text for delta in part.deltas),
            "logprobs": None,
            "finish_reason": part.choice.finish_reason,
            "token_ids": list(chunk.token_ids),
        }
        if chunk.logprobs is not None:
            notes = self._notes.setdefault(index, Notes(self._server.spelling, part.choice.echoed))
            choice["logprobs"] = notes.of(chunk.logprobs)
        if self._options.include_origins:
            choice["origins"] = origins(part)
        frame = {**self._head, "choices": [choice]}
        if chunk.finish_reason is not None:
            frame["metrics"] = self._reply.metrics()
        return {**frame, "usage": None} if self._options.include_usage else frame
