"""Who may call, from where, how much; and what a reply never tells."""

from __future__ import annotations

import logging
import socket
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest

from dflash.errors import ConfigError
from dflash.serve import ServeConfig
from tests.serve.conftest import Serving, chat, listening, toy_pair

URL = "/v1/chat/completions"


def test_it_listens_to_this_machine_only_unless_told() -> None:
    assert ServeConfig().host == "127.0.0.1"


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_a_key_is_asked_for_where_there_is_one(serving: Serving, header: str) -> None:
    client = serving(api_keys=("secret one", "other"))
    scheme = "Bearer " if header == "authorization" else ""
    for key in ("secret one", "other"):
        assert client.post(URL, json=chat(), headers={header: scheme + key}).status_code == 200
    for wrong in ("secret", "", "secret onex"):
        said = client.post(URL, json=chat(), headers={header: scheme + wrong})
        assert said.status_code == 401
        assert said.json()["error"]["type"] == "authentication_error"
    assert client.get("/metrics").status_code == 401
    assert client.get("/v1/models").status_code == 401
    assert client.get("/health").status_code == 200
    assert client.post("/v1/messages", json={}).json()["type"] == "error"


def test_another_hosts_name_is_refused_while_only_loopback_is_served(serving: Serving) -> None:
    client = serving(hosts=("my.box",))
    for host, status in (
        ("evil.example", 403),
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("my.box", 200),
    ):
        assert client.get("/v1/models", headers={"host": host}).status_code == status
    open_to_all = serving(host="0.0.0.0")
    assert open_to_all.get("/v1/models", headers={"host": "any.example"}).status_code == 200


@pytest.mark.parametrize("host", ["[::1", "a]b", "[x]:8000", "a:b:c", "", "@"])
def test_a_host_that_is_none_is_refused_in_one_line(
    serving: Serving, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dflash.serve")
    chunks = iter([b'{"messages": ', b"[]}"])
    said = serving().post(URL, content=chunks, headers={"host": host})
    assert said.status_code == 403
    assert "is not served here" in said.json()["error"]["message"]
    assert len(caplog.records) == 1 and "403" in caplog.text


def test_other_origins_may_call_only_where_they_are_named(serving: Serving) -> None:
    origin = {"origin": "https://a.example"}
    assert "access-control-allow-origin" not in serving().get("/health", headers=origin).headers
    client = serving(origins=("https://a.example",), api_keys=("k",))
    assert client.get("/health", headers=origin).headers["access-control-allow-origin"]
    asks = {**origin, "access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "authorization,content-type"
    assert client.options(URL, headers=asks).status_code == 200
    other = client.options(URL, headers={**asks, "origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("header", ["origin", "sec-fetch-site"])
def test_a_form_that_any_web_page_can_send_is_not_read(serving: Serving, header: str) -> None:
    body = '{"messages": [{"role": "user", "content": "hi"}]}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {"content-type": kind, header: "https://a.example"}
        said = serving().post(URL, content=body, headers=headers)
        assert said.status_code == 415
        assert "application/json" in said.json()["error"]["message"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_beyond_the_limit_is_413(serving: Serving, announced: bool) -> None:
    client = serving(most_body=2000)
    text = b'{"prompt": "' + b"x" * 4000 + b'"}'
    content: Any = text if announced else iter([text[:1500], text[1500:]])
    said = client.post(
        "/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    assert said.status_code == 413
    assert said.json()["error"]["type"] == "request_too_large"


def test_more_tokens_than_allowed_are_refused(serving: Serving) -> None:
    client = serving(most_tokens=30)
    assert client.post(URL, json=chat(max_tokens=31)).status_code == 400
    body = chat()
    del body["max_tokens"]
    assert client.post(URL, json=body).json()["usage"]["completion_tokens"] == 30


def test_a_schema_of_any_size_is_not_compiled(serving: Serving) -> None:
    schema = {"enum": ["x" * 100 + str(place) for place in range(1000)]}
    body = chat(structured_outputs={"json": schema})
    said = serving().post(URL, json=body)
    assert said.status_code == 400 and "65536 characters" in said.json()["error"]["message"]


def test_no_folder_of_this_machine_is_told(serving: Serving) -> None:
    pair = toy_pair()
    object.__setattr__(pair, "target_name", "/home/me/models/thing.Q4.gguf")
    client = serving(pair)
    assert client.get("/v1/models").json()["data"][0]["id"] == "thing.Q4"
    for url in ("/health", "/v1/models", "/metrics", "/openapi.json"):
        assert "/home/me" not in client.get(url).text
    assert client.get("/home/me/models/thing.Q4.gguf").status_code == 404
    assert client.get("/page/../../etc/passwd").status_code == 404


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools"])
def test_a_request_cannot_bring_a_template_or_reach_its_switches(
    serving: Serving, name: str
) -> None:
    body = chat(chat_template_kwargs={name: "{{ 7 * 7 }}"})
    said = serving().post(URL, json=body)
    assert said.status_code == 400 and name in said.json()["error"]["message"]


def test_the_log_has_no_text_unless_told(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dflash.serve")
    serving().post(URL + "?token=hidden", json=chat("swordfish"))
    assert "200" in caplog.text
    assert "swordfish" not in caplog.text and "hidden" not in caplog.text
    serving(log_prompts=True).post(URL, json=chat("swordfish"))
    assert "swordfish" in caplog.text and "answer" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"most_running": 0},
        {"most_seconds": 0},
        {"block_size": 0},
        {"api_keys": ("",)},
        {"host": ""},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServeConfig(**wrong)


@pytest.mark.parametrize("path", [URL, "/health"])
@pytest.mark.parametrize("host", ["localhost", "evil.example"])
@pytest.mark.parametrize("apart", [False, True], ids=["at once", "apart"])
def test_a_malformed_body_is_no_traceback(
    path: str,
    host: str,
    apart: bool,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with listening(toy_pair()) as address:
        place = urlsplit(address)
        with socket.create_connection((place.hostname, place.port), timeout=20) as client:
            client.sendall(head if apart else head + b"no length\r\n")
            if apart and host != "localhost":
                assert client.recv(12) == b"HTTP/1.1 403"  # before the body, which is not read
            if apart:
                client.sendall(b"no length\r\n")
            said = b"".join(iter(partial(client.recv, 1 << 16), b""))  # until it is closed
    assert apart or said.startswith(b"HTTP/1.1 400")
    assert not caplog.records
    assert capsys.readouterr().err == "WARNING:  Invalid HTTP request received.\n"
