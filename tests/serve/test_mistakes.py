"""What a client that is slightly wrong is told: one line that says what would be right."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.serve.conftest import Serving, chat

URL = "/v1/chat/completions"
BODIES = {
    URL: chat(max_tokens=3),
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": chat(max_tokens=3),
    "/v1/messages/count_tokens": {"messages": chat()["messages"]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [72]},
}


def told(reply: Any) -> str:
    return str(reply.json()["error"]["message"])


@pytest.mark.parametrize("url", BODIES)
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
def test_json_is_read_whatever_a_program_calls_it(
    client: TestClient, url: str, kind: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    said = client.post(url, content=json.dumps(BODIES[url]), headers=headers)
    assert said.status_code == 200, said.text


@pytest.mark.parametrize("url", BODIES)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is empty"),
        (b"prompt=hi", "the body is not JSON"),
        (b"[]", "the body is no JSON object"),
        (b"null", "the body is no JSON object"),
        (b'{"prompt": "caf\xe9"}', "not JSON in UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"modle": "x"}', "modle is not a field that this server knows. Did you mean model?"),
    ],
    ids=["empty", "form", "list", "null", "latin-1", "deep", "misspelt"],
)
def test_a_body_that_is_none_is_one_line(
    client: TestClient, url: str, body: bytes, words: str
) -> None:
    said = client.post(url, content=body)
    assert said.status_code == 400
    assert words in told(said)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_token": 3}, "Did you mean max_tokens?"),
        ({"Temperature": 1}, "Did you mean temperature?"),
        ({"speculative": {"blocksize": 2}}, "Did you mean block_size?"),
        ({"messages": [{"role": "user", "contnt": "x"}]}, "Did you mean content?"),
        ({"structured_outputs": {"jsn": {}}}, "Did you mean json?"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "Did you mean json_schema?"),
        ({"zzz": 1}, "zzz is not a field that this server knows. GET /docs"),
    ],
)
def test_a_misspelt_field_is_asked_after(
    client: TestClient, fields: dict[str, Any], words: str
) -> None:
    said = client.post(URL, json=chat() | fields)
    assert said.status_code == 400
    assert words in told(said)


def test_a_kind_of_content_that_is_not_read_is_named_before_its_fields(client: TestClient) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    said = client.post(URL, json=chat() | {"messages": [{"role": "user", "content": parts}]})
    assert "'text'" in told(said)


def test_a_field_that_is_null_is_named_once(client: TestClient) -> None:
    said = client.post(URL, json={"messages": None})
    assert said.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completion", URL),
        ("/chat/completions", URL),
        ("/models", "/v1/models"),
        ("/healthz", "/health"),
    ],
)
def test_a_misspelt_path_is_asked_after(client: TestClient, path: str, meant: str) -> None:
    said = client.get(path)
    assert said.status_code == 404
    assert told(said).endswith(f"Did you mean {meant}?")


def test_the_base_address_lists_the_routes(client: TestClient) -> None:
    said = client.get("/v1")
    assert said.status_code == 200
    assert {URL, "/v1/models", "/v1/models/{name}", "/docs"} <= set(said.json()["data"])


def test_a_wrong_method_and_an_unlikely_path_say_what_there_is(client: TestClient) -> None:
    assert told(client.get(URL)).endswith("Its method is POST")
    assert "GET /docs" in told(client.get("/q"))


def test_an_unknown_model_is_told_which_one_is_served(serving: Serving) -> None:
    client = serving(name="owner/thing")
    assert client.get("/v1/models/owner/thing").json()["id"] == "owner/thing"
    for said in (client.get("/v1/models/other"), client.post(URL, json=chat(model="other"))):
        assert said.status_code == 404
        assert told(said) == "there is no model 'other' here: this server has 'owner/thing'"
    assert client.get("/v1/models/").json()["data"][0]["id"] == "owner/thing"


def test_whether_it_is_up_can_be_asked_without_a_body(client: TestClient) -> None:
    assert client.head("/health").status_code == 200
    assert client.head("/nothing").status_code == 404
