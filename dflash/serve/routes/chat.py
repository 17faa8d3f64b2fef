"""``POST /v1/chat/completions``: a conversation continued, whole or as it comes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import ServerSentEvent

from dflash.serve import sse
from dflash.serve.calls import Call
from dflash.serve.conversation import Conversation, Tools
from dflash.serve.errors import ApiError
from dflash.serve.reply import Choice, Part, Reply
from dflash.serve.routes.shared import (
    STREAMED,
    Served,
    as_object,
    check_model,
    new_id,
    origins,
    whole,
)
from dflash.serve.schema.chat import ChatRequest, Message, NamedTool, Tool
from dflash.serve.schema.common import StreamOptions, without_none
from dflash.serve.server import Order, Server
from dflash.serve.splitter import Delta
from dflash.spelling import chat_logprobs

router = APIRouter()


@router.post("/v1/chat/completions", responses=STREAMED)
async def chat_completions(body: ChatRequest, request: Request, server: Served) -> Response:
    """Continue a conversation."""
    body.check()
    check_model(server, body.model)
    reply = await server.submit(lambda: order_of(body, server))
    if body.stream:
        return sse.answer(Stream(body, server, reply).frames(), reply.cancel)
    choices = await whole(request, reply)
    return JSONResponse(
        {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": server.name,
            "choices": [_choice(i, choice, body, server) for i, choice in enumerate(choices)],
            "usage": reply.usage(),
            "metrics": reply.metrics(),
        }
    )


def order_of(body: ChatRequest, server: Server) -> Order:
    """``body`` in the engine's words. Raises ApiError or PromptError."""
    conversation = Conversation(
        messages=[message_of(message) for message in body.messages],
        tools=_tools(body),
        variables=body.chat_template_kwargs or {},
        held=_held(body),
        effort=body.reasoning_effort,
    )
    understood = conversation.understood(server.engine.pair.tokenizer)
    more: dict[str, Any] = {
        "max_tokens": body.max_completion_tokens,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "n": body.n,
        "stop": body.stop,
    }
    if more["max_tokens"] is None:
        more["max_tokens"] = body.max_tokens
    return Order(
        prompts=[understood.ids],
        options=body.chosen() | understood.held | without_none(more),
        speculative=body.speculative,
        seconds=body.deadline,
        split=understood.split,
    )


def message_of(message: Message) -> dict[str, Any]:
    """A turn in the form that chat templates expect."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text or part.refusal or "" for part in content)
    calls = [_template_call(call.id, call.function) for call in message.tool_calls or ()]
    reasoning = message.reasoning_content or message.reasoning
    return {
        "role": "system" if message.role == "developer" else message.role,
        "content": content or "",
        **without_none(
            {
                "name": message.name,
                "tool_calls": calls or None,
                "tool_call_id": message.tool_call_id,
                "reasoning_content": reasoning,
                "reasoning": reasoning,
            }
        ),
    }


def _template_call(name: str | None, function: Any) -> dict[str, Any]:
    """A call as templates expect it."""
    arguments = as_object(function.arguments)
    return {
        "id": name,
        "type": "function",
        "function": {"name": function.name, "arguments": arguments},
    }


def functions_of(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """The functions offered, in the form that chat templates expect."""
    shown = {"name", "description", "parameters"}
    return [tool.function.model_dump(include=shown, exclude_none=True) for tool in tools or ()]


def _tools(body: ChatRequest) -> Tools:
    choice = body.tool_choice or "auto"
    named = choice.function.name if isinstance(choice, NamedTool) else None
    return Tools(
        functions_of(body.tools),
        "auto" if isinstance(choice, NamedTool) else choice,
        named,
        1 if body.parallel_tool_calls is False else None,
        [tool.function.name for tool in body.tools or () if tool.function.strict],
    )


def _held(body: ChatRequest) -> dict[str, Any]:
    held = body.structured_outputs.held() if body.structured_outputs else {}
    form = body.response_format
    if held and form is not None and form.type != "text":
        raise ApiError(400, "response_format and structured_outputs say the same: give one of them")
    if form is not None and form.type == "json_object":
        held["json_schema"] = {"type": "object"}
    if form is not None and form.type == "json_schema":
        held["json_schema"] = form.json_schema.schema_
    return held


def _choice(index: int, choice: Choice, body: ChatRequest, server: Server) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.content if choice.content or not choice.calls else None,
        "refusal": None,
    }
    if choice.reasoning and body.include_reasoning:
        message |= {"reasoning": choice.reasoning, "reasoning_content": choice.reasoning}
    if choice.calls:
        message["tool_calls"] = [_call(call) for call in choice.calls]
    notes = chat_logprobs(choice.logprobs, server.spelling) if body.logprobs else None
    return {
        "index": index,
        "message": message,
        "logprobs": notes,
        "finish_reason": choice.finish_reason,
    }


def _call(call: Call) -> dict[str, Any]:
    return {"id": new_id("call_"), "type": "function", "function": call._asdict()}


class Stream:
    """The frames of one streamed reply."""

    def __init__(self, body: ChatRequest, server: Server, reply: Reply) -> None:
        """Sends nothing yet."""
        self._body, self._server, self._reply = body, server, reply
        self._options = body.stream_options or StreamOptions()
        self._head = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": server.name,
        }
        self._told: dict[int, int] = {}  # calls told of, for each choice that has begun

    async def frames(self) -> AsyncIterator[ServerSentEvent]:
        """A role, then what each pass adds, then what it cost."""
        async for part in self._reply.parts():
            for frame in self._frames(part):
                yield sse.frame(frame)
        usage = self._reply.usage() if self._options.include_usage else None
        if usage is not None:
            yield sse.frame(
                {**self._head, "choices": [], "usage": usage, "metrics": self._reply.metrics()}
            )
        yield sse.DONE

    def _frames(self, part: Part) -> list[dict[str, Any]]:
        index, frames = part.chunk.index, []
        if index not in self._told:
            self._told[index] = 0
            frames.append(self._frame(index, {"role": "assistant", "content": ""}))
        more = self._more(part)
        deltas = [d for d in part.deltas if d.kind != "reasoning" or self._body.include_reasoning]
        for place, delta in enumerate(deltas):
            found = self._frame(index, self._delta(index, delta))
            frames.append(self._with(found, more) if place == len(deltas) - 1 else found)
        if more and not deltas:
            frames.append(self._with(self._frame(index, {}), more))
        if part.chunk.finish_reason is not None:
            last = self._frame(index, {}, part.choice.finish_reason)
            frames.append({**last, "metrics": self._reply.metrics()})
        return frames

    def _more(self, part: Part) -> dict[str, Any]:
        """What belongs to a pass and not to a piece of its text."""
        found: dict[str, Any] = {}
        if self._body.logprobs and part.chunk.logprobs:
            found["logprobs"] = chat_logprobs(part.chunk.logprobs, self._server.spelling)
        if self._options.include_origins:
            found["origins"] = origins(part)
        return found

    def _with(self, frame: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        frame["choices"][0] |= more
        return frame

    def _frame(
        self, index: int, delta: dict[str, Any], finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        frame = {**self._head, "choices": [choice]}
        return {**frame, "usage": None} if self._options.include_usage else frame

    def _delta(self, index: int, delta: Delta) -> dict[str, Any]:
        if delta.call is not None:
            place, self._told[index] = self._told[index], self._told[index] + 1
            return {"tool_calls": [{"index": place, **_call(delta.call)}]}
        if delta.kind == "reasoning":
            return {"reasoning": delta.text, "reasoning_content": delta.text}
        return {"content": delta.text}
