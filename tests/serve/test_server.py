"""What users of servers have run into: each report, and the kind of fault behind it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import exp
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from dflash.backends.toy import ToyModel, ToyPair
from dflash.core.logits import logprob
from dflash.engine import Engine
from dflash.errors import ConfigError, EngineClosed
from dflash.results import Chunk
from dflash.serve import ServeConfig
from dflash.serve.server import Server
from dflash.serve.worker import Job
from tests.serve.conftest import Serving, chat, listening, saying, toy_pair
from tests.serve.test_chat import URL, frames, text_of

TEXT = "/v1/completions"
STORY = "日本語 🙂👩‍👩‍👧 naïve e\u0301 z\u0323\u0307 Ünïcødé – ok."


def message(reply: Any) -> str:
    return str(reply.json()["choices"][0]["message"]["content"])


def tiny_pair(folder: Path) -> Callable[[], Any]:
    """Opens a tiny random target, with recurrent layers, and a tiny draft, each time anew."""
    from dflash.backends.torch import open_pair
    from dflash.config import LoadConfig
    from tests.backends.families import family
    from tests.backends.tiny import save_target, tiny_tokenizer
    from tests.facades.drafts import save_draft

    target = str(save_target(family("qwen3_next"), tiny_tokenizer(), folder / "target"))
    draft = str(save_draft(folder / "draft"))
    return lambda: open_pair(LoadConfig(target, draft, device="cpu", dtype="float32"))


@pytest.mark.parametrize("kind", ["toy", "torch"])
def test_eight_clients_with_forty_prompts_get_the_librarys_texts(kind: str, tmp_path: Path) -> None:
    """R10, R86: answers of others' requests, or wrong ones, under load. The prefix cache is on."""
    open_one, longest = (toy_pair, 20) if kind == "toy" else (tiny_pair(tmp_path), 4)
    bodies = [
        chat("word " * (place % 7) + f"prompt {place}", max_tokens=6 + place % longest)
        | ({"temperature": 1.1, "seed": place} if place % 3 == 0 else {})
        for place in range(40)
    ]
    wanted = []
    with Engine(open_one()) as engine:
        for body in bodies:
            options = {k: v for k, v in body.items() if k != "messages"}
            wanted.append(engine.generate(body["messages"], **options).text)
    with (
        listening(open_one(), cache_sessions=6) as address,
        httpx.Client(base_url=address.removesuffix("/v1"), timeout=60) as client,
        ThreadPoolExecutor(8) as threads,
    ):

        def ask(place: int) -> str:
            body = bodies[place % 40]
            if place % 2:
                return message(client.post(URL, json=body))
            said = client.post(URL, json={**body, "stream": True}).text.splitlines()
            return text_of([json.loads(line[6:]) for line in said if line.startswith("data: {")])

        places = [*range(40), *(reversed(range(40)) if kind == "toy" else ())]
        found = list(threads.map(ask, places))
    assert found == [wanted[place] for place in places]


FIELDS: dict[str, Any] = {
    "temperature": 1.5,
    "top_p": 1e-6,
    "top_k": 1,
    "min_p": 1.0,
    "seed": 8,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "repetition_penalty": 3.0,
    "no_repeat_ngram": 1,
    "logit_bias": {"70": 50.0},
    "bad_words": None,  # filled in from the plain text
    "stop": None,
    "stop_token_ids": None,
    "n": 2,
    "logprobs": 2,
    "max_tokens": 5,
    "min_tokens": 24,
    "ignore_eos": True,
    "echo": True,
    "structured_outputs": {"regex": "[0-9]{5}"},
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_changes_the_result(serving: Serving, name: str) -> None:
    """R17, R19, R25: fields that are taken and ignored."""
    pair = saying("Yes.")  # and ends
    if name not in ("min_tokens", "ignore_eos"):
        object.__setattr__(pair, "model", ToyModel(words=False))
    client = serving(pair)
    base: dict[str, Any] = {"prompt": "hello ", "temperature": 0, "max_tokens": 60, "min_tokens": 0}
    if name in ("top_p", "top_k", "min_p", "seed"):
        base |= {"temperature": 1.5, "seed": 7}
    if name == "ignore_eos":
        del base["min_tokens"]
    before = client.post(TEXT, json=base).json()["choices"]
    ids, text = before[0]["token_ids"], before[0]["text"]
    value = {"bad_words": [[ids[1]]], "stop_token_ids": [ids[1]], "stop": text[1:2]}.get(name)
    changed = FIELDS[name] if value is None else value
    after = client.post(TEXT, json={**base, name: changed})
    assert after.status_code == 200, after.text
    assert after.json()["choices"] != before


@pytest.mark.parametrize("url", [URL, TEXT, "/v1/responses", "/v1/messages", "/tokenize"])
def test_unknown_fields_are_an_error_everywhere(client: TestClient, url: str) -> None:
    said = client.post(url, json={"no_such_field": 1})
    assert said.status_code == 400
    assert "no_such_field" in said.text or "required" in said.text.lower()


def test_requests_with_and_without_options_are_kept_apart(client: TestClient) -> None:
    """R20: one request's penalties on another's text."""
    plain, other = chat(), chat(repetition_penalty=1.8, logit_bias={"101": -100})
    texts = [
        [message(client.post(URL, json=body)) for body in order]
        for order in ((plain, other), (other, plain))
    ]
    assert texts[0] == texts[1][::-1] and texts[0][0] != texts[0][1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_targets_own(serving: Serving, temperature: float) -> None:
    """R22, R23: null, or a probability of 1 for every token."""
    pair = toy_pair((2, 0, 4))
    object.__setattr__(pair, "model", ToyModel(eos_ids=frozenset(), words=False))
    body = {"prompt": "hello", "max_tokens": 25, "logprobs": 5, "seed": 1}
    choice = (
        serving(pair).post(TEXT, json={**body, "temperature": temperature}).json()["choices"][0]
    )
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"]) == 25
    history = list(b"hello")
    for token, value in zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True):
        own = logprob(pair.model.logits(pair.model.run(history)), token, 5)
        assert value == pytest.approx(own.logprob, abs=1e-5)
        history.append(token)
    assert sum(map(exp, choice["logprobs"]["token_logprobs"])) / 25 < 0.99


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8, 16])
def test_characters_cut_between_tokens_come_out_whole(serving: Serving, block_size: int) -> None:
    """R91: emoji and accents broken in streams."""
    body = chat(max_tokens=200, speculative={"block_size": block_size})
    found = frames(serving(saying(STORY)), body)
    assert text_of(found) == STORY
    assert "\ufffd" not in json.dumps(found, ensure_ascii=False)


def test_tokens_are_counted_and_not_chunks(serving: Serving) -> None:
    """R92: a chunk holds several tokens, and benchmarks count chunks."""
    for block_size in (1, 4, 16):
        body = chat(max_tokens=40, speculative={"block_size": block_size})
        body["stream_options"] = {"include_usage": True}
        found = frames(serving(toy_pair(None)), body)
        assert found[-1]["usage"]["completion_tokens"] == 40
        assert found[-1]["metrics"]["speculative_decoding"]["num_steps"] <= 40 / block_size + 1


def test_a_draft_that_is_off_is_said_to_be_off_and_why(serving: Serving) -> None:
    """R94: 200 with plain decoding, and nobody told."""
    engine = Engine(toy_pair(draft_block_size=None))
    object.__setattr__(engine.pair, "draft_name", None)
    client = serving()
    client.app.state.server = Server(engine, ServeConfig(), "the draft could not be loaded: no")  # type: ignore[attr-defined]
    client.app.state.server.start()  # type: ignore[attr-defined]
    health = client.get("/health").json()
    assert health["draft"] == "off" and "could not be loaded" in health["draft_off_because"]
    said = client.post(URL, json=chat()).json()["metrics"]["speculative_decoding"]
    assert not said["speculated"] and "could not be loaded" in said["reason"]


def test_requests_of_every_length_in_turn(client: TestClient) -> None:
    """R67: the second request crashes."""
    texts = [message(client.post(URL, json=chat("x" * n))) for n in (40, 5, 40, 1)]
    assert texts[0] == texts[2]


def test_an_engine_closed_under_load_is_one_error(serving: Serving) -> None:
    """R89: unloading while a request arrives."""
    client = serving()
    client.app.state.server.engine.close()  # type: ignore[attr-defined]
    said = client.post(URL, json=chat())
    assert said.status_code == 503 and said.json()["error"]["code"] == "shutting_down"
    with pytest.raises(EngineClosed):
        client.app.state.server.engine.generate("x")  # type: ignore[attr-defined]


def test_how_many_requests_run_at_once_is_said(serving: Serving) -> None:
    """R88: a quiet cap on concurrency."""
    health = serving(most_running=3).get("/health").json()
    assert (health["most_running"], health["running"], health["waiting"]) == (3, 0, 0)


def test_a_client_that_leaves_ends_its_request(serving: Serving) -> None:
    client = serving()
    server: Server = client.app.state.server  # type: ignore[attr-defined]

    async def leave() -> None:
        body = json.dumps(chat(max_tokens=3000, stream=True)).encode()
        sent: list[Any] = []
        messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
        scope = {
            "type": "http",
            "method": "POST",
            "path": URL,
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "raw_path": URL.encode(),
        }

        async def receive() -> Any:
            return messages.pop(0) if len(messages) > 1 or sent else await asyncio.sleep(1e9)

        async def send(message: Any) -> None:
            sent.append(message)

        await client.app(scope, receive, send)  # type: ignore[operator]

    client.portal.call(leave)  # type: ignore[union-attr]
    for _ in range(100):  # its next pass notices
        if not server.worker.running + server.worker.waiting:
            break
        message(client.post(URL, json=chat(max_tokens=1)))
    assert server.worker.running == server.worker.waiting == 0
    assert server.engine.kept.out == 0


def test_metrics_count_in_vllms_words(serving: Serving) -> None:
    client = serving()
    found = client.post(URL, json=chat(max_tokens=40)).json()["metrics"]["speculative_decoding"]
    client.post(URL, json=chat(temperature=-1))
    text = client.get("/metrics").text
    for prefix in ("dflash", "vllm"):

        def value(name: str, label: str = "", prefix: str = prefix) -> float:
            lines = re.findall(rf"^{prefix}:{name}{{([^}}]*)}} (\S+)$", text, re.M)
            (number,) = [number for labels, number in lines if label in labels]
            return float(number)

        assert value("spec_decode_num_drafts_total") == found["num_spec_steps"]
        assert value("spec_decode_num_draft_tokens_total") == found["num_draft_tokens"]
        assert value("spec_decode_num_accepted_tokens_total") == found["num_accepted_draft_tokens"]
        for place, count in enumerate(found["num_accepted_tokens_per_pos"]):
            if count:
                name = "spec_decode_num_accepted_tokens_per_pos_total"
                assert value(name, f'position="{place}"') == count
        assert value("generation_tokens_total") == 40
        assert value("num_requests_running") == 0
        assert value("time_to_first_token_seconds_count") == 1
        assert value("request_success_total", 'finished_reason="length"') == 1
        assert value("request_refused_total", 'status="400"') == 1


@pytest.mark.parametrize(
    ("config", "wish", "size"),
    [
        (None, None, 8),  # the draft's own default
        (4, None, 4),
        (4, {"block_size": 2}, 2),
        (99, None, 16),
        ("auto", None, None),
        (4, {"block_size": "auto"}, None),
        (4, {"enabled": False}, 1),
    ],
)
def test_the_block_size_is_the_requests_then_the_servers_then_the_drafts(
    serving: Serving, config: Any, wish: Any, size: int | None
) -> None:
    body = chat() if wish is None else chat(speculative=wish)
    said = serving(block_size=config).post(URL, json=body).json()
    found = said["metrics"]["speculative_decoding"]
    assert found["block_size"] == size
    assert found["clamped_from"] == (99 if config == 99 else None)


@pytest.mark.parametrize("tree", [12, "auto"])
def test_a_server_drafts_in_trees_and_says_the_same(serving: Serving, tree: Any) -> None:
    plain = serving(block_size=1).post(URL, json=chat(max_tokens=60)).json()
    client = serving(block_size="auto" if tree == "auto" else 6, draft_tree=tree)
    for wish in ({}, {"block_size": 4}, {"block_size": "auto"}, {"enabled": False}):
        said = client.post(URL, json=chat(max_tokens=60, speculative=wish)).json()
        assert said["choices"][0]["message"] == plain["choices"][0]["message"]
        found = said["metrics"]["speculative_decoding"]
        if tree == 12 and wish == {}:
            assert found["num_draft_tokens"] > 5 * found["num_steps"]


def test_a_server_says_at_once_that_there_can_be_no_trees(serving: Serving) -> None:
    with pytest.raises(ConfigError, match="there is no draft"):
        serving(ToyPair(draft_block_size=None), draft_tree=8)


def test_tokens_there_and_back(client: TestClient) -> None:
    found = client.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert found["count"] == 6 and found["tokens"] == list("héllo".encode())
    back = client.post("/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": "héllo"}
    messages = chat()["messages"]
    count = client.post("/tokenize", json={"messages": messages}).json()["count"]
    assert count == client.post(URL, json=chat()).json()["usage"]["prompt_tokens"]
    assert client.post("/detokenize", json={"tokens": [999]}).status_code == 400
    assert client.post("/tokenize", json={}).status_code == 400


def test_a_deadline_of_the_requests_own(client: TestClient) -> None:
    said = client.post(URL, json=chat(max_tokens=4000, deadline=0.001))
    assert said.status_code == 504 and said.json()["error"]["code"] == "deadline_exceeded"
    assert said.headers["x-should-retry"] == "false"


def test_a_full_line_is_429_and_says_when_to_come_back(serving: Serving) -> None:
    client = serving(most_running=1, most_waiting=0)
    server: Server = client.app.state.server  # type: ignore[attr-defined]
    gate: Queue[None] = Queue()

    def held() -> Iterator[Chunk]:
        gate.get(timeout=60)
        yield Chunk("x", (1,), ("target",))

    heard: Queue[Any] = Queue()
    server.worker.submit(Job(held(), heard.put))
    said = client.post(URL, json=chat())
    assert said.status_code == 429 and int(said.headers["retry-after"]) >= 1
    assert said.headers["x-should-retry"] == "true"
    gate.put(None)
    while heard.get(timeout=60) is not None:
        pass
    assert client.post(URL, json=chat()).status_code == 200


def test_nothing_new_is_taken_while_shutting_down(serving: Serving) -> None:
    client = serving()
    client.app.state.server.worker.drain()  # type: ignore[attr-defined]
    said = client.post(URL, json=chat())
    assert said.status_code == 503 and "retry-after" in said.headers
    assert client.get("/health").json()["status"] == "draining"
