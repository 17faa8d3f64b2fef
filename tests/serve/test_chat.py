"""/v1/chat/completions: the library's text, whole and in pieces, and what comes with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from dflash.core.policy import TOO_SHORT
from dflash.engine import Engine
from tests.serve.conftest import Serving, chat, toy_pair

URL = "/v1/chat/completions"


def frames(client: TestClient, body: dict[str, Any], url: str = URL) -> list[dict[str, Any]]:
    """The JSON of a stream's events, whose last must be the end mark."""
    said = client.post(url, json={**body, "stream": True})
    assert said.status_code == 200, said.text
    lines = [line.removeprefix("data: ") for line in said.text.split("\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(found: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for frame in found for choice in frame["choices"]]
    return "".join(c["delta"].get("content") or "" for c in choices if c["index"] == index)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.2, "seed": 5}, {"stop": ["er"]}])
def test_the_text_is_the_librarys(client: TestClient, fields: dict[str, Any]) -> None:
    body = chat(**fields)
    options = {k: v for k, v in body.items() if k != "messages"}
    with Engine(toy_pair()) as engine:
        wanted = engine.generate("hello", **options)
    said = client.post(URL, json=body).json()["choices"][0]
    assert said["message"]["content"] == wanted.text
    assert said["finish_reason"] == wanted.finish_reason
    streamed = frames(client, body)
    assert text_of(streamed) == wanted.text
    assert streamed[-1]["choices"][0]["finish_reason"] == wanted.finish_reason


def test_every_reply_says_whether_it_speculated_and_how_well(client: TestClient) -> None:
    body = chat(max_tokens=30)
    with Engine(toy_pair()) as engine:
        stats = engine.generate("hello", max_tokens=30).stats
    for reply in (client.post(URL, json=body).json(), frames(client, body)[-1]):
        found = reply["metrics"]["speculative_decoding"]
        assert found["speculated"] and found["reason"] is None
        assert found["num_accepted_draft_tokens"] == stats.accepted
        assert found["num_draft_tokens"] == stats.drafted
        assert found["draft_acceptance_rate"] == pytest.approx(stats.acceptance_rate)
        assert found["num_steps"] == stats.rounds
        plain = found["num_steps"] - found["num_spec_steps"]  # the last token needs no draft
        assert plain == 1
        assert found["mean_acceptance_length"] == 1 + stats.accepted / found["num_spec_steps"]
        histogram = list(found["acceptance_histogram"])
        histogram[0] += plain
        assert tuple(histogram) == stats.histogram


def test_a_reply_without_drafts_gives_the_reason_of_the_statistics(client: TestClient) -> None:
    with Engine(toy_pair()) as engine:
        wanted = engine.generate("hello", max_tokens=2, block_size="auto").stats
    body = chat(max_tokens=2, speculative={"block_size": "auto"})
    said = client.post(URL, json=body).json()["metrics"]["speculative_decoding"]
    assert not said["speculated"] and said["reason"] == wanted.fallback_reason == TOO_SHORT


def test_origins_say_who_made_each_token_pass_by_pass(client: TestClient) -> None:
    body = chat(stream_options={"include_origins": True})
    found = [c for frame in frames(client, body) for c in frame["choices"] if "origins" in c]
    passes = [choice["origins"] for choice in found]
    assert "".join(piece["text"] for one in passes for piece in one["pieces"]) == text_of(
        frames(client, body)
    )
    assert [one["accepted"] for one in passes[1:4]] == [1, 3, 0]
    assert sum(one["committed"] for one in passes) == 24
    assert all(one["drafted"] >= one["accepted"] for one in passes)


def test_usage_counts_tokens_and_comes_in_streams_when_asked(client: TestClient) -> None:
    whole = client.post(URL, json=chat()).json()["usage"]
    assert whole["completion_tokens"] == 24
    assert whole["total_tokens"] == whole["prompt_tokens"] + 24
    plain = frames(client, chat())
    assert not any(frame.get("usage") for frame in plain)
    last = frames(client, chat(stream_options={"include_usage": True}))[-1]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 24
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_request_can_turn_speculation_off_or_size_its_block(client: TestClient) -> None:
    plain = client.post(URL, json=chat(speculative={"enabled": False})).json()
    found = plain["metrics"]["speculative_decoding"]
    assert not found["speculated"] and "turned speculation off" in found["reason"]
    sized = client.post(URL, json=chat(speculative={"block_size": 99})).json()
    found = sized["metrics"]["speculative_decoding"]
    assert (found["block_size"], found["clamped_from"]) == (16, 99)
    assert plain["choices"][0]["message"] == sized["choices"][0]["message"]


def test_several_texts_carry_their_index(serving: Serving) -> None:
    body = chat(n=3, temperature=1.3, seed=4)
    client = serving()
    choices = client.post(URL, json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in choices]
    assert len(set(texts)) == 3
    streamed = frames(client, body)
    assert [text_of(streamed, index) for index in range(3)] == texts
