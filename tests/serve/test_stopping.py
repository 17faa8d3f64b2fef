"""The signal to stop, in the middle of work: no accepted request goes without an end."""

from __future__ import annotations

import json
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import StringIO
from threading import Barrier
from urllib.parse import urlsplit

import httpx
import pytest

from bench.serving import served
from tests.serve.conftest import chat
from tests.serve.test_chat import URL

CLIENTS = 6
TOY = ("--model", "toy", "--draft", "toy:script:1,3,0", "--max-running", "3")
LONG = {"max_tokens": 4000, "n": 16}  # many seconds


def ends(address: str, begun: Barrier, **fields: int) -> str:
    """How a long stream ends: done, or with an error event."""
    body = chat(**{"max_tokens": 600, "stream": True, "ignore_eos": True, **fields})
    with (
        httpx.Client(base_url=address, timeout=60) as client,
        client.stream("POST", URL, json=body) as reply,
    ):
        begun.wait()
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2].removeprefix("data: "))
    return str(last["error"]["code"]) if "error" in last else "done"


@contextmanager
def deaf(address: str) -> Iterator[None]:
    """A client that asks for a long stream and does not read it."""
    body = json.dumps(chat(stream=True, ignore_eos=True, **LONG)).encode()
    place = urlsplit(address)
    head = f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((place.hostname, place.port)) as client:
        client.sendall(head.encode() + body)
        assert client.recv(12) == b"HTTP/1.1 200"
        yield


def wait_for(words: str, log: StringIO) -> None:
    """Until the server says ``words``."""
    until = time.monotonic() + 60
    while words not in log.getvalue():
        assert time.monotonic() < until, log.getvalue()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("drain", "wanted"), [("60", {"done"}), ("0", {"done", "shutting_down"})], ids=["drain", "now"]
)
def test_a_signal_under_load_loses_no_accepted_request(drain: str, wanted: set[str]) -> None:
    flags = [*TOY, "--drain-seconds", drain]
    begun = Barrier(CLIENTS + 1)
    with (
        tempfile.TemporaryFile("w+") as log,
        served(flags, log) as (server, address),
        ThreadPoolExecutor(CLIENTS) as threads,
    ):
        asking = [threads.submit(ends, address, begun) for _ in range(CLIENTS)]
        begun.wait()  # every stream has been accepted
        server.send_signal(signal.SIGTERM)
        found = {one.result() for one in asking}
        assert server.wait(60) == 0
    assert found <= wanted
    if drain == "0":
        assert "shutting_down" in found


def test_it_says_what_it_waits_for_and_a_second_signal_ends_that() -> None:
    begun, log = Barrier(2), StringIO()
    with (
        served([*TOY, "--drain-seconds", "300"], log) as (server, address),
        ThreadPoolExecutor(1) as threads,
    ):
        asking = threads.submit(ends, address, begun, **LONG)
        begun.wait()
        server.send_signal(signal.SIGINT)
        wait_for("waiting for 1 request, 300 s at most. Ctrl-C once more ends", log)
        server.send_signal(signal.SIGINT)
        assert asking.result() == "shutting_down"
        assert server.wait(20) == 130
    assert "Traceback" not in log.getvalue()


def test_a_client_that_does_not_read_holds_nobody_up_after_a_second_signal() -> None:
    log = StringIO()
    with (
        served([*TOY, "--drain-seconds", "300"], log) as (server, address),
        deaf(address),
    ):
        server.send_signal(signal.SIGINT)
        wait_for("waiting for 1 request", log)
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 130
    assert "Traceback" not in log.getvalue()


def test_a_server_without_work_stops_without_a_word() -> None:
    log = StringIO()
    with served(TOY, log) as (server, _):
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
    assert "waiting" not in log.getvalue()
