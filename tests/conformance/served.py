"""A call as a request to each of the server's routes, and what its reply says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi.testclient import TestClient

from dflash.engine import Engine
from dflash.serve import create_app

if TYPE_CHECKING:
    from tests.conformance.backends import Scripted
    from tests.conformance.entries import Call

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
LIMIT = {RESPONSES: "max_output_tokens"}
STOP = {MESSAGES: "stop_sequences"}
WIRE = {"bad_words": list, "logit_bias": lambda pairs: {str(t): bias for t, bias in pairs}}
Said = tuple[str | None, list[int] | None, str | None]  # text, ids, stop or length


def ask(pair: Scripted, call: Call, url: str, streamed: bool) -> Said:
    """The reply to ``call``, and that it speculated as well as its draft can."""
    with Engine(pair) as engine, TestClient(create_app(engine), base_url="http://localhost") as web:
        said = web.post(url, json=_body(call, url, streamed))
        assert said.status_code == 200, said.text
        if not streamed:
            return _whole(said.json(), url)
        lines = [line[6:] for line in said.text.splitlines() if line.startswith("data: {")]
        return _streamed([json.loads(line) for line in lines], url)


def _body(call: Call, url: str, streamed: bool) -> dict[str, Any]:
    options = {name: WIRE.get(name, lambda x: x)(value) for name, value in call.options.items()}
    body: dict[str, Any] = {
        "temperature": call.temperature,
        "seed": call.seed,
        "speculative": {"block_size": call.block_size},
        LIMIT.get(url, "max_tokens"): call.max_tokens,
        "stream": streamed,
        **options,
    }
    if call.stop:
        body[STOP.get(url, "stop")] = list(call.stop)
    if url == TEXT:
        return {**body, "prompt": call.text}
    if url == RESPONSES:
        return {**body, "input": call.text}
    return {**body, "messages": [{"role": "user", "content": call.text}]}


def _whole(reply: Mapping[str, Any], url: str) -> Said:
    if url == TEXT:
        choice = reply["choices"][0]
        return choice["text"], choice["token_ids"], choice["finish_reason"]
    if url == CHAT:
        choice = reply["choices"][0]
        return choice["message"]["content"], None, choice["finish_reason"]
    if url == RESPONSES:
        text = reply["output"][0]["content"][0]["text"]
        return text, None, "length" if reply["status"] == "incomplete" else "stop"
    return reply["content"][0]["text"], None, _reason(reply["stop_reason"])


def _streamed(frames: list[dict[str, Any]], url: str) -> Said:
    if url == TEXT:
        choices = [choice for frame in frames for choice in frame["choices"]]
        ids = [token for choice in choices for token in choice["token_ids"]]
        return "".join(c["text"] for c in choices), ids, choices[-1]["finish_reason"]
    if url == CHAT:
        choices = [choice for frame in frames for choice in frame["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        return text, None, choices[-1]["finish_reason"]
    if url == RESPONSES:
        deltas = [f["delta"] for f in frames if f["type"] == "response.output_text.delta"]
        whole = _whole(frames[-1]["response"], url)
        assert whole[0] == "".join(deltas)
        return whole
    deltas = [f["delta"]["text"] for f in frames if f["type"] == "content_block_delta"]
    (ending,) = [f["delta"]["stop_reason"] for f in frames if f["type"] == "message_delta"]
    return "".join(deltas), None, _reason(ending)


def _reason(reason: str) -> str:
    return "length" if reason == "max_tokens" else "stop"
