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
