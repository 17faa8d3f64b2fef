"""The API's description: offline, whole, and what the server really does."""

from __future__ import annotations

import re

from fastapi.testclient import TestClient


def test_the_page_needs_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/docs").text
    assert not re.search(r"<script|https?://|src=", page)
    for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
        assert path in page
    assert "speculative" in page and "max_completion_tokens" in page


def test_errors_are_documented_as_they_come(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    for methods in document["paths"].values():
        for operation in methods.values():
            assert "4XX" in operation["responses"] and "422" not in operation["responses"]
    said = client.post("/v1/chat/completions", json={})
    assert said.status_code == 400
    assert set(said.json()["error"]) == {"message", "type", "param", "code"}


def test_streams_are_documented_as_they_come(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a"}
    for path, needed in {
        "/v1/completions": ("prompt",),
        "/v1/chat/completions": ("messages",),
        "/v1/responses": ("input",),
        "/v1/messages": ("messages",),
    }.items():
        known = paths[path]["post"]["responses"]["200"]["content"]
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        fields = {name: body[name] for name in needed} | {limit: 4}
        for stream in (False, True):
            said = client.post(path, json={**fields, "stream": stream})
            assert said.headers["content-type"].split(";")[0] in known


def test_a_wrong_method_is_told_the_right_one(client: TestClient) -> None:
    said = client.request("TRACE", "/v1/completions")
    assert (said.status_code, said.headers["allow"]) == (405, "POST")
    assert "TRACE" in said.json()["error"]["message"]
