"""A field is honoured or refused, also where it says nothing beside the others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.conftest import Serving, chat, saying

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
SAID = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("route", "fields", "words"),
    [
        (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
        (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, chat(top_logprobs=2), "top_logprobs"),
        (CHAT, chat(max_completion_tokens=9), "max_completion_tokens"),
        (CHAT, chat(response_format=FORM, structured_outputs={"json": SCHEMA}), "give one"),
        (CHAT, chat(deadline=1e9), "deadline"),
        (MESSAGES, chat(tool_choice={"type": "tool"}), "tool_choice"),
        (MESSAGES, chat(tool_choice={"type": "auto", "name": "count"}), "tool_choice"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "for messages"),
        ("/tokenize", {**SAID, "add_special_tokens": True}, "add_special_tokens"),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "text", "schema": SCHEMA}}},
            "text.format.schema",
        ),
    ],
)
def test_what_says_nothing_beside_the_others_is_refused(
    serving: Serving, route: str, fields: dict[str, Any], words: str
) -> None:
    said = serving().post(route, json=fields)
    assert said.status_code == 400
    assert words in said.json()["error"]["message"]


def test_the_same_fields_are_taken_where_they_say_something(serving: Serving) -> None:
    client = serving()
    for fields in (
        chat(stream=True, stream_options={"include_usage": True}),
        chat(logprobs=True, top_logprobs=2),
        chat(max_completion_tokens=24),
        chat(deadline=5),
    ):
        assert client.post(CHAT, json=fields).status_code == 200
    assert client.post("/tokenize", json={**SAID, "add_special_tokens": False}).status_code == 200


@pytest.mark.parametrize("route", [CHAT, "/v1/responses", MESSAGES])
@pytest.mark.parametrize(("given", "fits"), [('{"a": 1}', True), ('{"a": "one"}', False)])
def test_a_call_of_a_strict_function_fits_its_schema_or_is_none(
    serving: Serving, route: str, given: str, fits: bool
) -> None:
    text = f'<tool_call>{{"name": "count", "arguments": {given}}}</tool_call>'
    client = serving(saying(text, "tools <tool_call>"))
    for strict in (True, False):
        tool: Any = {**TOOL["function"], "strict": strict}  # type: ignore[dict-item]
        if route == CHAT:
            body = chat(max_tokens=200, tools=[{"type": "function", "function": tool}])
        elif route == MESSAGES:
            tool["input_schema"] = tool.pop("parameters")
            body = chat(max_tokens=200, tools=[tool])
        else:
            body = {"input": "hi", "temperature": 0, "tools": [{"type": "function", **tool}]}
        said = client.post(route, json=body)
        assert said.status_code == 200, said.text
        called = any(mark in said.text for mark in ('"call_', '"toolu_'))
        assert called == (fits or not strict)


def test_properties_of_a_strict_call_come_in_any_order(serving: Serving) -> None:
    schema = {**SCHEMA, "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    text = '<tool_call>{"name": "count", "arguments": {"b": "x", "a": 1}}</tool_call>'
    function = {"name": "count", "parameters": schema, "strict": True}
    body = chat(max_tokens=200, tools=[{"type": "function", "function": function}])
    client = serving(saying(text, "tools <tool_call>"))
    assert client.post(CHAT, json=body).json()["choices"][0]["finish_reason"] == "tool_calls"


def test_a_strict_function_without_a_usable_schema_is_refused(serving: Serving) -> None:
    function = {"name": "count", "parameters": {"type": "nonsense"}, "strict": True}
    body = chat(tools=[{"type": "function", "function": function}])
    said = serving().post(CHAT, json=body)
    assert said.status_code == 400 and "count" in said.json()["error"]["message"]


def test_a_failed_tool_is_told_to_the_model(serving: Serving) -> None:
    client = serving(saying("Yes.", "tools <tool_call>"))
    call = {"type": "tool_use", "id": "t", "name": "count", "input": {"a": 1}}

    def tokens(**more: Any) -> int:
        result = {"type": "tool_result", "tool_use_id": "t", "content": "no", **more}
        turns = [*SAID["messages"], {"role": "assistant", "content": [call]}]
        turns.append({"role": "user", "content": [result]})  # type: ignore[dict-item]
        said = client.post(f"{MESSAGES}/count_tokens", json={"messages": turns})
        return int(said.json()["input_tokens"])

    assert tokens(is_error=True) == tokens() + len("Error: ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (chat(speculative={"block_size": 0}), "speculative.block_size"),
        (chat(stop=[1]), "stop.0"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({}, "messages"),
    ],
)
def test_a_field_is_named_as_the_request_wrote_it(
    serving: Serving, fields: dict[str, Any], param: str
) -> None:
    refused = serving().post(CHAT, json=fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("route", "fields", "name"),
    [
        (CHAT, chat(stop=""), "stop"),
        (TEXT, {"prompt": "a", "stop": ["b", ""]}, "stop.1"),
        ("/v1/responses", {"input": "a", "stop": ""}, "stop"),
        (MESSAGES, chat(stop_sequences=[""]), "stop_sequences.0"),
        (CHAT, chat(stop=["b", "\ud800"]), "stop.1"),  # half a character: in no text
    ],
)
def test_a_stop_string_that_cannot_be_meant_is_named_as_its_api_does(
    serving: Serving, route: str, fields: dict[str, Any], name: str
) -> None:
    kind = {"content-type": "application/json"}
    refused = serving().post(route, content=json.dumps(fields), headers=kind)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(f"{name}: ")


def test_stop_strings_may_be_many_and_none_need_ever_come(serving: Serving) -> None:
    client = serving()
    plain = client.post(CHAT, json=chat()).json()["choices"][0]
    stop = [f"never said {number}" for number in range(40)]
    found = client.post(CHAT, json=chat(stop=stop))
    assert found.status_code == 200
    assert found.json()["choices"][0]["message"] == plain["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_of_tokens_count_an_echoed_prompt(serving: Serving, stream: bool) -> None:
    body = {"prompt": "Once", "max_tokens": 6, "temperature": 0, "echo": True, "logprobs": 0}
    answer = serving().post(TEXT, json={**body, "stream": stream})
    frames = (
        [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        if stream
        else [answer.json()]
    )
    choices = [choice for frame in frames for choice in frame["choices"]]
    text = "".join(choice["text"] for choice in choices)
    notes = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens = [token for note in notes for token in note["tokens"]]
    offsets = [offset for note in notes for offset in note["text_offset"]]
    assert len(tokens) == 6
    assert [
        text[place : place + len(t)] for t, place in zip(tokens, offsets, strict=True)
    ] == tokens
