"""The signal to stop, in the middle of work: no accepted request goes without an end."""

from __future__ import annotations

import json
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import httpx
import pytest

from bench.serving import served
from tests.serve.conftest import chat
from tests.serve.test_chat import URL

CLIENTS = 6
TOY = ("--model", "toy", "--draft", "toy:script:1,3,0", "--max-running", "3")


def ends(address: str, begun: Barrier) -> str:
    """How a long stream ends: done, or with an error event."""
    body = chat(max_tokens=600, stream=True, ignore_eos=True)
    with (
        httpx.Client(base_url=address, timeout=60) as client,
        client.stream("POST", URL, json=body) as reply,
    ):
        begun.wait()
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2].removeprefix("data: "))
    return str(last["error"]["code"]) if "error" in last else "done"


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
