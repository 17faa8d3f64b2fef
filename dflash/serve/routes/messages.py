"""``POST /v1/messages``: Anthropic's API, whole or as it comes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import ServerSentEvent

from dflash.errors import PromptError
from dflash.serve import sse
from dflash.serve.calls import Call
from dflash.serve.conversation import Conversation, Tools
from dflash.serve.errors import ApiError, as_api_error
from dflash.serve.reply import Choice, Reply
from dflash.serve.routes.shared import STREAMED, Served, check_model, new_id, whole
from dflash.serve.schema.common import without_none
from dflash.serve.schema.messages import CountRequest, MessagesRequest, Prompted, TextBlock, Turn
from dflash.serve.server import Order, Server
from dflash.serve.splitter import Delta

router = APIRouter()


@router.post("/v1/messages", responses=STREAMED)
async def messages(body: MessagesRequest, request: Request, server: Served) -> Response:
    """Continue a conversation."""
    body.check()
    check_model(server, body.model)
    reply = await server.submit(lambda: _order(body, server))
    if body.stream:
        return sse.answer(Stream(body, server, reply).frames(), reply.cancel, anthropic=True)
    (choice,) = await whole(request, reply)
    return JSONResponse(
        {
            **_head(server),
            "content": list(_blocks(choice, body.shows_thinking)),
            **_ending(choice, body, server),
            "usage": _usage(reply),
            "metrics": reply.metrics(),
        }
    )


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, server: Served) -> dict[str, int]:
    """How many tokens the prompt has."""
    check_model(server, body.model)

    def count() -> int:
        try:
            return len(_conversation(body).understood(server.engine.pair.tokenizer).ids)
        except PromptError as problem:
            raise as_api_error(problem) from problem

    return {"input_tokens": await server.prepare(count)}


def _order(body: MessagesRequest, server: Server) -> Order:
    understood = _conversation(body).understood(server.engine.pair.tokenizer)
    more = {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        more["thinking_budget"] = body.thinking.budget_tokens
    return Order(
        prompts=[understood.ids],
        options=body.chosen() | understood.held | without_none(more),
        speculative=body.speculative,
        seconds=body.deadline,
        split=understood.split,
    )


def _conversation(body: Prompted) -> Conversation:
    turns = [turn for said in body.messages for turn in _turns(said)]
    if body.system:
        turns.insert(0, {"role": "system", "content": _text(body.system)})
    kind = None if body.thinking is None else body.thinking.type
    effort = {"enabled": "on", "disabled": "none"}.get(kind or "")
    variables = body.chat_template_kwargs or {}
    return Conversation(turns, _tools(body), variables, effort=effort)


def _turns(said: Turn) -> Iterator[dict[str, Any]]:
    """A turn in the form of chat templates; results of tools are turns of their own there."""
    if isinstance(said.content, str):
        yield {"role": said.role, "content": said.content}
        return
    turn: dict[str, Any] = {"role": said.role, "content": ""}
    for block in said.content:
        if block.type == "tool_result":
            text = _text(block.content or "")
            text = f"Error: {text}" if block.is_error else text
            yield {"role": "tool", "content": text, "tool_call_id": block.tool_use_id}
        elif block.type == "text":
            turn["content"] += block.text
        elif block.type == "thinking":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
        else:
            function = {"name": block.name, "arguments": block.input}
            call = {"id": block.id, "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
    if len(turn) > 2 or turn["content"]:
        yield turn


def _text(given: str | Sequence[TextBlock]) -> str:
    return given if isinstance(given, str) else "".join(block.text for block in given)


def _tools(body: Prompted) -> Tools:
    functions = [
        without_none({"name": t.name, "description": t.description, "parameters": t.input_schema})
        for t in body.tools or ()
    ]
    choice = body.tool_choice
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        raise ApiError(400, "tool_choice has a name where its type is tool", param="tool_choice")
    strict = [tool.name for tool in body.tools or () if tool.strict]
    if choice is None:
        return Tools(functions, strict=strict)
    return Tools(
        functions,
        {"any": "required", "none": "none"}.get(choice.type, "auto"),  # type: ignore[arg-type]
        choice.name if choice.type == "tool" else None,
        1 if choice.disable_parallel_tool_use else None,
        strict,
    )


def _head(server: Server) -> dict[str, Any]:
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": server.name}


def _blocks(choice: Choice, shown: bool) -> Iterator[dict[str, Any]]:
    if choice.reasoning:
        yield {"type": "thinking", "thinking": choice.reasoning if shown else "", "signature": ""}
    if choice.content or not choice.calls:
        yield {"type": "text", "text": choice.content}
    for call in choice.calls:
        yield {**_begun(call), "input": json.loads(call.arguments)}


def _begun(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": new_id("toolu_"), "name": call.name, "input": {}}


def _ending(choice: Choice, body: MessagesRequest, server: Server) -> dict[str, Any]:
    """Why it ended; a stop sequence is named."""
    found = None
    if choice.finish_reason == "stop" and body.stop_sequences:
        text = server.engine.pair.tokenizer.decode(choice.token_ids)
        ends = [(text.find(stop) + len(stop), stop) for stop in body.stop_sequences if stop in text]
        found = min(ends)[1] if ends else None
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    reason = "stop_sequence" if found else reasons[choice.finish_reason or "stop"]
    return {"stop_reason": reason, "stop_sequence": found}


def _usage(reply: Reply) -> dict[str, int]:
    usage = reply.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }


class Stream:
    """The frames of one streamed reply: a message of blocks, each begun, added to, ended."""

    def __init__(self, body: MessagesRequest, server: Server, reply: Reply) -> None:
        """Sends nothing yet."""
        self._body, self._server, self._reply = body, server, reply
        self._index, self._kind = -1, ""  # the block that is open
        self._shown = body.shows_thinking

    async def frames(self) -> AsyncIterator[ServerSentEvent]:
        """From message_start to message_stop."""
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": self._reply.prompt_tokens, "output_tokens": 0}
        message = {**_head(self._server), **empty, "usage": usage}
        yield _event("message_start", message=message)
        async for part in self._reply.parts():
            for delta in part.deltas:
                for event in self._delta(delta):
                    yield event
        if self._index < 0:
            yield self._begin("text", {"type": "text", "text": ""})
        yield _event("content_block_stop", index=self._index)
        ending = _ending(self._reply.choices[0], self._body, self._server)
        more = {"usage": _usage(self._reply), "metrics": self._reply.metrics()}
        yield _event("message_delta", delta=ending, **more)
        yield _event("message_stop")

    def _delta(self, delta: Delta) -> Iterator[ServerSentEvent]:
        if delta.call is not None:
            yield from self._end()
            yield self._begin("call", _begun(delta.call))
            yield self._add({"type": "input_json_delta", "partial_json": delta.call.arguments})
            return
        thinking = delta.kind == "reasoning"
        if self._kind != delta.kind:
            yield from self._end()
            block = {"type": "text", "text": ""}
            if thinking:
                block = {"type": "thinking", "thinking": "", "signature": ""}
            yield self._begin(delta.kind, block)
        if thinking and not self._shown:
            return
        key = "thinking" if thinking else "text"
        yield self._add({"type": f"{key}_delta", key: delta.text})

    def _begin(self, kind: str, block: dict[str, Any]) -> ServerSentEvent:
        self._index, self._kind = self._index + 1, kind
        return _event("content_block_start", index=self._index, content_block=block)

    def _add(self, delta: dict[str, Any]) -> ServerSentEvent:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _end(self) -> Iterator[ServerSentEvent]:
        if self._index >= 0:
            yield _event("content_block_stop", index=self._index)


def _event(kind: str, **fields: Any) -> ServerSentEvent:
    return sse.frame({"type": kind, **fields}, event=kind)
