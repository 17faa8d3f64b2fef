"""A budget of reasoning is kept, and changes neither law of speculation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.conftest import Serving, chat, saying

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
THOUGHT = "<think>\nhm hm hm hm hm hm\n</think>\n\nYes."
TEMPLATE = "<think> enable_thinking"


def thinking(budget: int, **fields: Any) -> dict[str, Any]:
    said = {"type": "enabled", "budget_tokens": budget}
    return chat(max_tokens=80, thinking=said, **fields)


def parts(reply: Any) -> tuple[str, str]:
    """Reasoning and text."""
    assert reply.status_code == 200, reply.text
    blocks = reply.json()["content"]
    thoughts = "".join(b["thinking"] for b in blocks if b["type"] == "thinking")
    return thoughts, "".join(b["text"] for b in blocks if b["type"] == "text")


def test_reasoning_ends_where_its_budget_does(serving: Serving) -> None:
    client = serving(saying(THOUGHT, TEMPLATE))
    assert parts(client.post(MESSAGES, json=thinking(1024))) == ("hm hm hm hm hm hm", "Yes.")
    thoughts, text = parts(client.post(MESSAGES, json=thinking(7)))  # the line break is one
    assert thoughts == "hm hm"
    assert text  # the answer goes on behind the mark


@pytest.mark.parametrize("block", [2, 3, 6])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}])
def test_a_budget_gives_the_same_text_with_and_without_drafts(
    serving: Serving, block: int, sampling: dict[str, Any]
) -> None:
    client = serving(saying(THOUGHT, TEMPLATE))
    for budget in (1, 7):
        body = thinking(budget, **sampling)
        plain = client.post(MESSAGES, json={**body, "speculative": {"enabled": False}})
        drafted = client.post(MESSAGES, json={**body, "speculative": {"block_size": block}})
        assert parts(plain) == parts(drafted)


def test_a_draft_that_foresees_the_mark_is_never_wasted(serving: Serving) -> None:
    pair = saying(THOUGHT, TEMPLATE)
    object.__setattr__(pair, "script", None)  # always right
    body = {**thinking(7), "speculative": {"block_size": 4}}
    told = serving(pair).post(MESSAGES, json=body).json()["metrics"]["speculative_decoding"]
    wasted = told["num_draft_tokens"] - told["num_accepted_draft_tokens"]
    assert wasted < 3, "only the last block is cut, where the text ends"


@pytest.mark.parametrize("route", [CHAT, "/v1/responses"])
def test_other_apis_have_the_budget_under_another_name(serving: Serving, route: str) -> None:
    client = serving(saying(THOUGHT, TEMPLATE))
    body = chat(max_tokens=80, thinking_budget=7)
    if route != CHAT:
        body = {"input": "hello", "temperature": 0, "thinking_budget": 7}
        body |= {"max_output_tokens": 80}
    usage = client.post(route, json=body).json()["usage"]
    details = usage.get("completion_tokens_details") or usage["output_tokens_details"]
    assert details["reasoning_tokens"] <= 7 + len("<think></think>") + 6


def test_reasoning_may_stay_out_of_the_reply(serving: Serving) -> None:
    client = serving(saying(THOUGHT, TEMPLATE))
    said = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    reply = client.post(MESSAGES, json=chat(max_tokens=80, thinking=said))
    assert parts(reply) == ("", "Yes.")
    streamed = client.post(MESSAGES, json=chat(max_tokens=80, thinking=said, stream=True)).text
    assert "thinking_delta" not in streamed and '"type":"thinking"' in streamed


@pytest.mark.parametrize(
    ("template", "fields", "words"),
    [
        ("role: content", {"thinking": {"type": "enabled", "budget_tokens": 9}}, "switch"),
        (TEMPLATE, {"thinking": {"type": "disabled", "budget_tokens": 9}}, "budget_tokens"),
        (TEMPLATE, {"thinking": {"type": "adaptive", "budget_tokens": 9}}, "budget_tokens"),
        (TEMPLATE, {"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(
    serving: Serving, template: str, fields: dict[str, Any], words: str
) -> None:
    said = serving(saying(THOUGHT, template)).post(MESSAGES, json=chat(**fields))
    assert said.status_code == 400
    assert words in said.json()["error"]["message"]


def test_a_budget_beside_a_held_text_is_refused(serving: Serving) -> None:
    form = {"response_format": {"type": "json_object"}, "thinking_budget": 5}
    said = serving(saying(THOUGHT, TEMPLATE)).post(CHAT, json=chat(**form))
    assert said.status_code == 400 and "reasoning" in said.json()["error"]["message"]


def test_a_template_that_always_reasons_needs_no_switch(serving: Serving) -> None:
    client = serving(saying(THOUGHT, "<think>"))
    assert parts(client.post(MESSAGES, json=thinking(7)))[0] == "hm hm"
