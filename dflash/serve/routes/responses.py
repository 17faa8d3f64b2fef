"""``POST /v1/responses``: OpenAI's newer API, stateless, whole or as it comes."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import ServerSentEvent

from dflash.serve import sse
from dflash.serve.conversation import Conversation, Tools
from dflash.serve.errors import ApiError
from dflash.serve.reply import Choice, Reply
from dflash.serve.routes.items import Items
from dflash.serve.routes.shared import STREAMED, Served, as_object, check_model, new_id, whole
from dflash.serve.schema.common import without_none
from dflash.serve.schema.responses import ContentPart, Item, NamedChoice, ResponsesRequest
from dflash.serve.server import Order, Server

router = APIRouter()


@router.post("/v1/responses", responses=STREAMED)
async def responses(body: ResponsesRequest, request: Request, server: Served) -> Response:
    """Continue a conversation, which the request carries whole."""
    body.check()
    check_model(server, body.model)
    reply = await server.submit(lambda: _order(body, server))
    answer = Answer(body, server, reply)
    if body.stream:
        return sse.answer(answer.frames(), reply.cancel)
    (choice,) = await whole(request, reply)
    return JSONResponse(answer.complete(choice))


def _order(body: ResponsesRequest, server: Server) -> Order:
    turns = _turns(body)
    understood = Conversation(
        messages=turns,
        tools=_tools(body),
        variables=body.chat_template_kwargs or {},
        held=_held(body),
        effort=body.reasoning.effort if body.reasoning else None,
    ).understood(server.engine.pair.tokenizer)
    more = {
        "max_tokens": body.max_output_tokens,
        "logprobs": _logprobs(body),
        "stop": body.stop,
    }
    return Order(
        prompts=[understood.ids],
        options=body.chosen() | understood.held | without_none(more),
        speculative=body.speculative,
        seconds=body.deadline,
        split=understood.split,
    )


def _logprobs(body: ResponsesRequest) -> int | None:
    asked = body.include is not None and "message.output_text.logprobs" in body.include
    return (body.top_logprobs or 0) if asked or body.top_logprobs else None


def _turns(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation in the form of chat templates: calls join the turn that made them."""
    turns: list[dict[str, Any]] = []
    if body.instructions:
        turns.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*turns, {"role": "user", "content": body.input}]
    reasoning = ""
    for item in body.input:
        if item.type == "reasoning":
            reasoning += "".join(part.text for part in item.content or item.summary or ())
            continue
        turn = _turn(item)
        if reasoning and turn["role"] == "assistant":
            turn["reasoning_content"], reasoning = reasoning, ""
        if turn.get("tool_calls") and turns and turns[-1]["role"] == "assistant":
            turns[-1].setdefault("tool_calls", []).extend(turn["tool_calls"])
            continue
        turns.append(turn)
    if not turns:
        raise ApiError(400, "input is empty", param="input")
    return turns


def _turn(item: Item) -> dict[str, Any]:
    if item.type == "function_call":
        function = {"name": item.name, "arguments": as_object(item.arguments)}
        call = {"id": item.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if item.type == "function_call_output":
        return {"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id}
    assert item.type == "message", "reasoning joins the turn after it"
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": _text(item.content)}


def _text(given: str | list[ContentPart]) -> str:
    if isinstance(given, str):
        return given
    return "".join(part.text or part.refusal or "" for part in given)


def _tools(body: ResponsesRequest) -> Tools:
    shown = {"name", "description", "parameters"}
    functions = [tool.model_dump(include=shown, exclude_none=True) for tool in body.tools or ()]
    choice = body.tool_choice or "auto"
    most = 1 if body.parallel_tool_calls is False else None
    strict = [tool.name for tool in body.tools or () if tool.strict]
    if isinstance(choice, NamedChoice):
        return Tools(functions, "auto", choice.name, most, strict)
    return Tools(functions, choice, None, most, strict)


def _held(body: ResponsesRequest) -> dict[str, Any]:
    form = body.text.format if body.text else None
    if form is None or form.type == "text":
        return {}
    if form.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if form.schema_ is None:
        raise ApiError(400, "a json_schema format needs a schema", param="text.format.schema")
    return {"json_schema": form.schema_}


class Answer:
    """The response object, as it stands and as it comes."""

    def __init__(self, body: ResponsesRequest, server: Server, reply: Reply) -> None:
        """Sends nothing yet."""
        self._body, self._server, self._reply = body, server, reply
        self._id, self._created = new_id("resp_"), int(time.time())
        self._items = Items(server, _logprobs(body) is not None)
        self._sent = 0

    def complete(self, choice: Choice) -> dict[str, Any]:
        """The whole of it."""
        cut = choice.finish_reason == "length"
        usage = self._reply.usage()
        return {
            **self._base("incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items.of(choice),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
            "metrics": self._reply.metrics(),
        }

    async def frames(self) -> AsyncIterator[ServerSentEvent]:
        """From response.created to response.completed."""
        for kind in ("response.created", "response.in_progress"):
            yield self._frame(kind, response=self._base("in_progress"))
        try:
            async for part in self._reply.parts():
                for event in self._items.events(part):
                    yield self._frame(**event)
        except ApiError as problem:
            error = {"code": problem.code or "server_error", "message": str(problem)}
            yield self._frame("error", **error, param=problem.param)
            return
        for event in self._items.end():
            yield self._frame(**event)
        choice = self._reply.choices[0]
        kind = "incomplete" if choice.finish_reason == "length" else "completed"
        yield self._frame(f"response.{kind}", response=self.complete(choice))

    def _frame(self, type: str, **fields: Any) -> ServerSentEvent:
        number, self._sent = self._sent, self._sent + 1
        return sse.frame({"type": type, "sequence_number": number, **fields}, event=type)

    def _base(self, status: str) -> dict[str, Any]:
        body = self._body
        given = json.loads(body.model_dump_json(by_alias=True, exclude_none=True))
        form = (given.get("text") or {}).get("format") or {"type": "text"}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._server.name,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": form},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }
