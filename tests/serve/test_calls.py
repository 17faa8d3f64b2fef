"""Tool calls and reasoning: every family's way of writing them, cut anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash.serve.calls import BARE, DEEPSEEK, HERMES, XML, Family, family_of, forced_schema
from dflash.serve.splitter import Delta, Splitter
from tests.serve.conftest import Serving, chat, saying

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
OFFERED = {"weather": WEATHER, "now": None}
CALL = '{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}'

WRITTEN: dict[str, tuple[Family, str]] = {
    "hermes": (HERMES, f"See.\n<tool_call>\n{CALL}\n</tool_call>"),
    "hermes, a list": (HERMES, f"See.<tool_call>[{CALL}]</tool_call>"),
    "hermes, not closed": (HERMES, f"See.<tool_call>{CALL}"),
    "qwen's xml": (
        XML,
        "See.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    ),
    "deepseek": (
        DEEPSEEK,
        "See.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        '```json\n{"city": "Oslo", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "llama": (BARE, '{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}'),
    "mistral": (BARE, f"[TOOL_CALLS] [{CALL}]"),
    "mistral, newer": (BARE, 'weather[ARGS]{"city": "Oslo", "days": 2}'),
}


def split(text: str, size: int, **options: Any) -> list[Delta]:
    splitter = Splitter(**options)
    parts = [text[start : start + size] for start in range(0, len(text), size)]
    return [delta for part in parts for delta in splitter.feed(part)] + splitter.finish()


def joined(deltas: list[Delta], kind: str) -> str:
    return "".join(delta.text for delta in deltas if delta.kind == kind)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_is_found_however_the_text_is_cut(name: str, size: int) -> None:
    family, text = WRITTEN[name]
    found = split(text, size, family=family, offered=OFFERED)
    (call,) = [delta.call for delta in found if delta.call is not None]
    assert call.name == "weather"
    assert json.loads(call.arguments) == {"city": "Oslo", "days": 2}
    assert joined(found, "content") == ("See." if text.startswith("See.") else "")


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("family", "text"),
    [
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call> so'),
        (HERMES, "a \n <tool_call>not json</tool_call>\n"),
        (HERMES, "a \n <tool_call>not json"),
        (HERMES, "a <tool_ b <tool_call c"),
        (XML, "<tool_call><function=other></function></tool_call>"),
        (BARE, '{"name": "unknown"}'),
        (BARE, '{"a": 1} is an object'),
        (BARE, "weather in Oslo is fine"),
        (BARE, "  plain text"),
    ],
)
def test_what_is_no_call_stays_text_to_the_letter(family: Family, text: str, size: int) -> None:
    found = split(text, size, family=family, offered=OFFERED)
    assert joined(found, "content") == text
    assert all(delta.call is None for delta in found)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_several_calls_and_a_limit_on_them(size: int) -> None:
    text = "".join(f"<tool_call>{CALL}</tool_call>\n" for _ in range(3))
    for most, count in ((None, 3), (1, 1)):
        found = split(text, size, family=HERMES, offered=OFFERED, most_calls=most)
        assert len([delta for delta in found if delta.call is not None]) == count


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("text", "options", "reasoning", "content"),
    [
        ("<think>\nhm < ha\n</think>\n\nYes.", {"think": True}, "hm < ha", "Yes."),
        ("hm\n</think>\n\nYes.", {"inside": True}, "hm", "Yes."),
        ("hm, cut off", {"inside": True}, "hm, cut off", ""),
        ("Yes. <think> is a mark", {"think": True}, "", "Yes. <think> is a mark"),
        ("<thin air", {"think": True}, "", "<thin air"),
        ("<think>no parser</think>", {}, "", "<think>no parser</think>"),
    ],
)
def test_reasoning_is_told_apart(
    text: str, options: dict[str, Any], reasoning: str, content: str, size: int
) -> None:
    found = split(text, size, **options)
    assert joined(found, "reasoning") == reasoning
    assert joined(found, "content") == content


def test_a_template_names_its_family() -> None:
    assert family_of("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert family_of("{% if tools %}<tool_call><function={% endif %}") is XML
    assert family_of("{% if tools %}[TOOL_CALLS]{% endif %}") is BARE
    assert family_of("{% for m in messages %}") is None


def test_references_of_a_forced_schema_lead_somewhere() -> None:
    schema = {"$defs": {"c": {"type": "string"}}, "properties": {"city": {"$ref": "#/$defs/c"}}}
    found = forced_schema({"weather": schema}, ["weather"])
    assert found["$defs"] == {"c": {"type": "string"}}
    assert found["properties"]["name"] == {"const": "weather"}


TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


@pytest.mark.parametrize("stream", [False, True])
def test_both_names_of_reasoning_are_sent(serving: Serving, stream: bool) -> None:
    client = serving(saying("<think>\nhm\n</think>\n\nYes.", "<think> enable_thinking"))
    said = client.post("/v1/chat/completions", json=chat(max_tokens=64, stream=stream))
    if stream:
        lines = [line[6:] for line in said.text.splitlines() if line.startswith("data: {")]
        deltas = [c["delta"] for line in lines for c in json.loads(line)["choices"]]
        for name in ("reasoning", "reasoning_content"):
            assert "".join(delta.get(name, "") for delta in deltas) == "hm"
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
        return
    message = said.json()["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"]) == ("hm", "hm")
    assert message["content"] == "Yes."
    assert said.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_template_switches_reach_the_template_or_are_refused(serving: Serving) -> None:
    client = serving(saying("Yes.", "enable_thinking"))
    for fields in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high"},
        {"reasoning_effort": "none"},
    ):
        assert client.post("/v1/chat/completions", json=chat(**fields)).status_code == 200
    for fields in ({"chat_template_kwargs": {"no_such_switch": 1}},):
        said = client.post("/v1/chat/completions", json=chat(**fields))
        assert said.status_code == 400 and "no_such_switch" in said.json()["error"]["message"]
    plain = serving(saying("Yes."))
    assert plain.post("/v1/chat/completions", json=chat(reasoning_effort="high")).status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
    ],
)
def test_choices_of_tools_that_make_no_sense_are_refused(
    serving: Serving, fields: dict[str, Any]
) -> None:
    assert serving().post("/v1/chat/completions", json=chat(**fields)).status_code == 400
