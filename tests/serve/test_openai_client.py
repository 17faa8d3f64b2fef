"""What OpenAI's own client documents, against a listening server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from dflash.engine import Engine
from tests.serve.conftest import listening, saying, toy_pair

SAID = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with listening(toy_pair(ends=True)) as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def plain() -> str:
    with Engine(toy_pair(ends=True)) as engine:
        return engine.generate("hello", max_tokens=24).text


def ask(client: Any, **fields: Any) -> Any:
    given = {"model": "toy", "messages": SAID, "temperature": 0, "max_tokens": 24, **fields}
    return client.chat.completions.create(**given)


def test_models_are_listed_and_found(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").owned_by == "dflash"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client: Any, plain: str) -> None:
    found = ask(client)
    assert found.choices[0].message.content == plain
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 24


def test_chat_stream_with_usage(client: Any, plain: str) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-2].choices[0].finish_reason == "length"


def test_the_stream_helper_adds_up_to_the_same(client: Any) -> None:
    given = {"model": "toy", "messages": SAID, "temperature": 0, "max_tokens": 2000}
    with client.chat.completions.stream(**given) as stream:
        found = stream.get_final_completion()
    whole = ask(client, max_tokens=2000)
    assert found.choices[0].message.content == whole.choices[0].message.content


def test_logprobs(client: Any) -> None:
    found = ask(client, logprobs=True, top_logprobs=3).choices[0]
    notes = found.logprobs.content
    assert len(notes) == 24 and all(len(note.top_logprobs) == 3 for note in notes)
    assert "".join(note.token for note in notes) == found.message.content
    assert all(bytes(note.bytes).decode() == note.token for note in notes)
    chunks = list(ask(client, logprobs=True, top_logprobs=3, stream=True))
    streamed = [n for c in chunks if c.choices[0].logprobs for n in c.choices[0].logprobs.content]
    assert streamed == notes


def test_a_required_tool_is_called(client: Any) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        found = ask(client, tools=[TOOL], tool_choice=choice, max_tokens=200).choices[0]
        assert found.finish_reason == "tool_calls"
        (call,) = found.message.tool_calls
        assert call.function.name == "weather"
        assert set(json.loads(call.function.arguments)) == {"city"}
    chunks = list(ask(client, tools=[TOOL], tool_choice="required", max_tokens=200, stream=True))
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].function.name == "weather"
    assert json.loads("".join(call.function.arguments for call in calls)).keys() == {"city"}


def test_a_tool_that_the_model_calls_by_itself() -> None:
    text = (
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    )
    with listening(saying(text)) as address, openai.OpenAI(base_url=address, api_key="x") as client:
        found = ask(client, tools=[TOOL], max_tokens=200).choices[0]
        assert found.message.content == "Let me see."
        assert json.loads(found.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
        # the answer of the tool goes back
        call = found.message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "rain"}
        again = ask(client, messages=[*SAID, call, result], tools=[TOOL], max_tokens=200)
        assert again.choices[0].finish_reason == "tool_calls"
        silent = ask(client, tools=[TOOL], tool_choice="none", max_tokens=200).choices[0]
        assert silent.message.content == text and silent.message.tool_calls is None


class Weather(BaseModel):
    """What the structured answer must be."""

    sunny: bool
    wind: int


def test_structured_outputs(client: Any) -> None:
    found = client.chat.completions.parse(
        model="toy", messages=SAID, temperature=0, max_tokens=200, response_format=Weather
    )
    assert isinstance(found.choices[0].message.parsed, Weather)
    whole = ask(client, response_format={"type": "json_object"}, max_tokens=300)
    if whole.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(whole.choices[0].message.content), dict)
    else:
        assert whole.choices[0].message.content.lstrip().startswith("{")


def test_completions(client: Any) -> None:
    with Engine(toy_pair(ends=True)) as engine:
        texts = [
            engine.generate(prompt, chat_template=False, max_tokens=9).text for prompt in ("a", "b")
        ]
    given = {"model": "toy", "prompt": ["a", "b"], "temperature": 0, "max_tokens": 9}
    found = client.completions.create(**given, logprobs=2)
    assert [choice.text for choice in found.choices] == texts
    assert "".join(found.choices[0].logprobs.tokens) == texts[0]
    assert found.usage.prompt_tokens == 2
    chunks = list(client.completions.create(**given, stream=True))
    assert "".join(c.choices[0].text for c in chunks if c.choices[0].index == 1) == texts[1]
    echoed = client.completions.create(**{**given, "prompt": "a"}, echo=True)
    assert echoed.choices[0].text == "a" + texts[0]


def test_responses(client: Any, plain: str) -> None:
    given: Any = {"model": "toy", "input": "hello", "temperature": 0, "max_output_tokens": 24}
    found = client.responses.create(**given)
    assert found.output_text == plain
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert found.usage.output_tokens == 24
    kinds = [event.type for event in client.responses.create(**given, stream=True)]
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
    with client.responses.stream(**{**given, "max_output_tokens": 2000}) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == "".join(texts) and final.output_text.startswith(plain)
    parsed = client.responses.parse(**{**given, "max_output_tokens": 200}, text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    tool = {"type": "function", "name": "weather", "parameters": WEATHER}
    forced = {**given, "max_output_tokens": 200, "tools": [tool], "tool_choice": "required"}
    called = client.responses.create(**forced)
    assert called.output[0].type == "function_call" and called.output[0].name == "weather"
    chunks = list(client.responses.create(**forced, stream=True))
    assert chunks[-1].response.output[0].name == "weather"


def test_responses_carry_the_conversation_themselves(client: Any) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    found = client.responses.create(model="toy", input=items, max_output_tokens=4)
    assert found.usage.output_tokens <= 4
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="toy", input="hi", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="store"):
        client.responses.create(model="toy", input="hi", store=True)


def test_errors_are_of_the_clients_own_kinds(client: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        ask(client, model="other")
    with pytest.raises(openai.BadRequestError) as found:
        ask(client, extra_body={"tempersture": 1})
    assert found.value.param == "tempersture"
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, messages=[{"role": "user", "content": "x" * 5000}])
    assert long.value.code == "context_length_exceeded"


async def _together(address: str, plain: str) -> None:
    async with openai.AsyncOpenAI(base_url=address, api_key="none") as client:
        stream = await ask(client, stream=True)
        found = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(found) == plain


def test_the_asynchronous_client(address: str, plain: str) -> None:
    import asyncio

    asyncio.run(_together(address, plain))
