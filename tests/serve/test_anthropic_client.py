"""What Anthropic's own client documents of messages, against a listening server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from dflash.engine import Engine
from tests.serve.conftest import listening, saying, toy_pair

SAID = [{"role": "user", "content": "hello"}]
TOOL = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def connect(address: str) -> Any:
    base = address.removesuffix("/v1")
    return anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with listening(toy_pair(ends=True)) as address, connect(address) as found:
        yield found


@pytest.fixture(scope="module")
def plain() -> str:
    with Engine(toy_pair(ends=True)) as engine:
        return engine.generate("hello", max_tokens=24).text


def ask(client: Any, **fields: Any) -> Any:
    extra = {"temperature": 0}
    given = {"model": "toy", "messages": SAID, "max_tokens": 24, "extra_body": extra, **fields}
    return client.messages.create(**given)


def test_a_message(client: Any, plain: str) -> None:
    found = ask(client)
    assert found.content[0].text == plain
    assert found.stop_reason == "max_tokens" and found.usage.output_tokens == 24


def test_a_stream(client: Any, plain: str) -> None:
    given = {"model": "toy", "messages": SAID, "max_tokens": 24, "extra_body": {"temperature": 0}}
    with client.messages.stream(**given) as stream:
        assert "".join(stream.text_stream) == plain
        final = stream.get_final_message()
    assert final.content[0].text == plain and final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 24


def test_system_and_blocks_are_the_same_prompt_as_their_text(client: Any) -> None:
    blocks = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    texts = {
        ask(client, messages=[{"role": "user", "content": content}], system=system).content[0].text
        for content in ("hello", blocks)
        for system in ("Be brief.", [{"type": "text", "text": "Be brief."}])
    }
    assert len(texts) == 1


def test_a_stop_sequence_is_named(client: Any, plain: str) -> None:
    stop = plain[10:13]
    found = ask(client, stop_sequences=["never said", stop])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == plain[: plain.index(stop)]


def test_a_tool_must_be_called(client: Any) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        found = ask(client, tools=[TOOL], tool_choice=choice, max_tokens=200)
        assert found.stop_reason == "tool_use"
        (block,) = found.content
        assert block.name == "weather" and set(block.input) == {"city"}


def test_a_tool_that_the_model_calls_and_its_result() -> None:
    text = 'See.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    with listening(saying(text)) as address, connect(address) as client:
        given = {"model": "toy", "messages": SAID, "max_tokens": 200, "tools": [TOOL]}
        with client.messages.stream(**given, extra_body={"temperature": 0}) as stream:
            found = stream.get_final_message()
        said, called = found.content
        assert said.text == "See." and called.input == {"city": "Oslo"}
        result = {"type": "tool_result", "tool_use_id": called.id, "content": "rain"}
        turns = [
            *SAID,
            {"role": "assistant", "content": [block.model_dump() for block in found.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        ]
        assert ask(client, messages=turns, tools=[TOOL], max_tokens=200).stop_reason == "tool_use"


def test_thinking_is_a_block_of_its_own() -> None:
    with (
        listening(saying("<think>\nhm\n</think>\n\nYes.", "enable_thinking <think>")) as address,
        connect(address) as client,
    ):
        found = ask(client, max_tokens=64, thinking={"type": "enabled", "budget_tokens": 1024})
        assert [block.type for block in found.content] == ["thinking", "text"]
        assert (found.content[0].thinking, found.content[1].text) == ("hm", "Yes.")
        short = ask(client, max_tokens=64, thinking={"type": "enabled", "budget_tokens": 2})
        assert short.content[0].thinking == "h", "a line break and one letter, and it is ended"
        given = {"model": "toy", "messages": SAID, "max_tokens": 64}
        with client.messages.stream(**given, extra_body={"temperature": 0}) as stream:
            blocks = stream.get_final_message().content
        assert [block.type for block in blocks] == ["thinking", "text"]


def test_tokens_are_counted(client: Any) -> None:
    count = client.messages.count_tokens(model="toy", messages=SAID).input_tokens
    found = ask(client).usage
    assert count == found.input_tokens + found.cache_read_input_tokens


def test_errors_are_of_the_clients_own_kinds(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="other")
    with pytest.raises(anthropic.BadRequestError) as found:
        ask(client, extra_body={"nonsense": 1})
    assert "nonsense" in str(found.value) and found.value.body["type"] == "error"
