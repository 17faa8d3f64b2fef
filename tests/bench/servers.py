"""Fake OpenAI-compatible servers, each with the fields that its original documents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Barrier, Lock, Thread
from typing import Any

WORDS = [f"word{place} " for place in range(20)]
ROUNDS, ACCEPTED, DEPTH = 10, 10, 3  # of each answer: 1 + ROUNDS + ACCEPTED tokens
TOKENS = 1 + ROUNDS + ACCEPTED
HISTOGRAM = [4, 3, 2, 1]  # of accepted drafts: 3 + 4 + 3 = ACCEPTED


class Fake:
    """Answers every chat with the same words, and remembers what it was asked."""

    def __init__(self, owner: str, last: Mapping[str, Any] = {}, prefix: str | None = None) -> None:
        """``last`` joins the last event of each answer; ``prefix`` that of the counters."""
        self.owner, self.last, self.prefix = owner, last, prefix
        self.asked: list[dict[str, Any]] = []
        self.stream, self.usage, self.models = True, True, ["m"]
        self.together: Barrier | None = None  # requests wait for each other
        self._lock, self._answers = Lock(), 0

    def metrics(self) -> str | None:
        if self.prefix is None:
            return None
        kept = [sum(HISTOGRAM[place:]) for place in range(1, DEPTH + 1)]
        name, times = f"{self.prefix}:spec_decode_num", self._answers
        lines = ["# HELP nothing", f'{name}_drafts_total{{engine="0"}} {ROUNDS * times:.1f}']
        lines += [f'{name}_draft_tokens_total{{engine="0"}} {ROUNDS * DEPTH * times:.1f}']
        lines += [f'{name}_accepted_tokens_total{{engine="0"}} {ACCEPTED * times:.1f}']
        label = 'engine="0",position='
        lines += [
            f'{name}_accepted_tokens_per_pos_total{{{label}"{i}"}} {float(k * times)}'
            for i, k in enumerate(kept)
        ]
        return "\n".join(lines)

    def events(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        with self._lock:
            self.asked.append(body)
            self._answers += 1
        if self.together is not None:
            self.together.wait(10)
        usage = {"prompt_tokens": 7, "completion_tokens": TOKENS} if self.usage else None
        parts = [{"choices": [{"delta": {"content": word}}]} for word in WORDS]
        return [*parts, {"choices": [], "usage": usage, **self.last}]


@contextmanager
def served(fake: Fake) -> Iterator[str]:
    """The address of ``fake``, listening."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            metrics = fake.metrics()
            if self.path == "/v1/models":
                models = [{"id": name, "owned_by": fake.owner} for name in fake.models]
                self._send(200, json.dumps({"data": models}).encode(), "application/json")
            elif self.path == "/metrics" and metrics is not None:
                self._send(200, metrics.encode(), "text/plain")
            else:
                self._send(404, b"nothing here", "text/plain")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            events = fake.events(body)
            if not fake.stream:
                whole = {**events[-1], "choices": [{"message": {"content": "".join(WORDS)}}]}
                self._send(200, json.dumps(whole).encode(), "application/json")
                return
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            text = ": ping\n\n" + "".join(lines) + "data: [DONE]\n\n"
            self._send(200, text.encode(), "text/event-stream")

        def _send(self, code: int, body: bytes, kind: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


DETAILS = {
    "num_spec_steps": ROUNDS,
    "num_accepted_draft_tokens": ACCEPTED,
    "num_draft_tokens": ROUNDS * DEPTH,
    "num_spec_tokens": DEPTH,
    "acceptance_histogram": HISTOGRAM,
}
SGLANG = {
    "spec_verify_ct": ROUNDS,
    "spec_num_correct_drafts": ACCEPTED,
    "spec_num_proposed_drafts": ROUNDS * DEPTH,
    "spec_correct_drafts_histogram": HISTOGRAM,
    "spec_accept_length": 2.0,
}
TIMINGS = {"predicted_n": TOKENS, "draft_n": ROUNDS * DEPTH, "draft_n_accepted": ACCEPTED}


def vllm() -> Fake:
    return Fake("vllm", {"metrics": {"speculative_decoding": DETAILS}}, "vllm")


def sglang() -> Fake:
    return Fake("sglang", {"sglext": {"spec_tokens_details": SGLANG}})


def llama() -> Fake:
    return Fake("llamacpp", {"timings": TIMINGS}, "llamacpp")


def ours() -> Fake:
    return Fake("dflash", {}, "dflash")
