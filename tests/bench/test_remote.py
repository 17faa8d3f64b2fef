"""Servers as arms: what is sent, what is read, and what becomes of a server that is not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from dflash.bench import counters
from dflash.bench.remote import connect
from dflash.bench.trial import Ask
from dflash.errors import ConfigError, DownloadError
from tests.bench import servers
from tests.bench.servers import ACCEPTED, DEPTH, HISTOGRAM, ROUNDS, TOKENS, Fake, served
from tests.cli.running import run

ASK = Ask(({"role": "user", "content": "Why?"},))


@pytest.mark.parametrize("make", [servers.vllm, servers.sglang, servers.llama])
@pytest.mark.parametrize("stream", [True, False])
def test_acceptance_is_read_from_the_fields_of_each_server(
    make: Callable[[], Fake], stream: bool
) -> None:
    fake = make()
    fake.stream = stream
    with served(fake) as url:
        found = connect(url, None).answer(ASK, 30)
    assert (found.tokens, found.prompt_tokens) == (TOKENS, 7)
    assert (found.rounds, found.drafted) == (ROUNDS, ROUNDS * DEPTH)
    assert found.accepted == ACCEPTED
    assert found.text == "".join(servers.WORDS)
    assert found.prefill > 0 and found.decode >= 0
    if fake.owner != "llamacpp":  # which tells nothing by position
        assert (found.histogram, found.judged) == (tuple(HISTOGRAM), (ROUNDS,) * DEPTH)


def test_blocks_of_different_depth_are_counted_step_by_step() -> None:
    details = {**servers.DETAILS, "per_step_drafted": [3, 3, 1, 0]}
    found = counters.of_answer({"metrics": {"speculative_decoding": details}}, TOKENS)
    assert found["judged"] == (3, 2, 2)


def test_upstreams_own_field_is_read_too() -> None:
    found = counters.of_answer({"choices": [{"meta_info": servers.SGLANG}]}, TOKENS)
    assert found["rounds"] == ROUNDS


def test_a_server_that_says_nothing_is_not_guessed_at() -> None:
    assert counters.of_answer({"choices": [{}], "timings": {"predicted_n": 9}}, 9) == {}


@pytest.mark.parametrize("prefix", ["vllm", "llamacpp", "dflash"])
def test_counters_are_read_under_every_prefix(prefix: str) -> None:
    fake = Fake("x", {}, prefix)
    with served(fake) as url:
        server = connect(url, "m")
        before = server.counters()
        server.answer(ASK, 30)
        server.answer(ASK, 30)
        after = server.counters()
    assert before is not None and after is not None
    found = (after - before).to_json()
    assert (found["rounds"], found["accepted"]) == (2 * ROUNDS, 2 * ACCEPTED)
    assert found["acceptance_length"] == pytest.approx(1 + ACCEPTED / ROUNDS)
    assert found["by_position"] == pytest.approx([0.6, 0.3, 0.1])


def test_the_same_counters_under_two_prefixes_count_once() -> None:
    page = (Fake("x", {}, "vllm"), Fake("x", {}, "dflash"))
    for fake in page:
        fake.events({})
    found = counters.parse("\n".join(fake.metrics() or "" for fake in page))
    assert found is not None and found.rounds == ROUNDS
    assert counters.parse("# nothing of the kind\nprocess_cpu_seconds 1.0") is None


def test_special_fields_go_only_to_the_server_that_knows_them() -> None:
    for make, there in ((servers.vllm, False), (servers.sglang, True)):
        fake = make()
        with served(fake) as url:
            connect(url + "/v1/", "m", body={"temperature": 0.0}).answer(ASK, 30)
        assert ("return_spec_tokens_details" in fake.asked[0]) is there
        assert fake.asked[0]["stream_options"] == {"include_usage": True}
        assert (fake.asked[0]["max_tokens"], fake.asked[0]["temperature"]) == (30, 0.0)


def test_a_server_that_is_not_there_is_one_error() -> None:
    with pytest.raises(DownloadError, match="Is the server running"):
        connect("http://127.0.0.1:9", None, timeout=5)


def test_a_model_has_to_be_named_where_there_are_several() -> None:
    fake = Fake("vllm")
    fake.models = ["a", "b"]
    with served(fake) as url, pytest.raises(ConfigError, match="serves a, b: name one"):
        connect(url, None)


def test_answers_without_a_token_count_cannot_be_measured() -> None:
    fake = Fake("other")
    fake.usage = False
    with served(fake) as url, pytest.raises(DownloadError, match="how many tokens"):
        connect(url, None).answer(ASK, 30)


def bench(*words: object) -> Any:
    done = run("bench", "--json", "--max-tokens", 30, *words)
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_a_server_is_measured_against_its_baseline(tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"turns": ["One?", "Two?"]}) + "\n")
    plain, fast = Fake("vllm"), servers.vllm()
    with served(plain) as slow, served(fast) as quick:
        found = bench("--base-url", quick, "--baseline-url", slow, "--prompts", file)
    assert [row["arm"] for row in found["rows"]] == ["baseline server", "server"]
    assert found["rows"][1]["totals"]["rounds"] == 6 * ROUNDS, "two turns, three repeats"
    assert found["servers"]["server"]["counters"]["rounds"] == 6 * ROUNDS, "without the warm-up"
    assert found["servers"]["baseline server"]["counters"] is None
    roles = [message["role"] for message in fast.asked[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_requests_run_at_the_concurrency_that_was_asked_for(tmp_path: Path) -> None:
    fake = servers.ours()
    fake.together = Barrier(3)  # breaks, and fails the run, unless three are there at a time
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(6)))
    with served(fake) as url:
        words = ("--base-url", url, "--prompts", file, "--warmup", 0, "--repeats", 1)
        found = bench(*words, "--concurrency", 3)
    load = found["servers"]["server"]
    assert (load["requests"], load["tokens"]) == (6, 6 * TOKENS)
    assert load["throughput"] == pytest.approx(load["tokens"] / load["seconds"])
    assert load["counters"]["rounds"] == 6 * ROUNDS
    assert "acceptance length 2.00" in found["notes"][0]


@pytest.mark.parametrize("where", ["--base-url", "--draft"])
def test_a_throughput_is_never_of_half_a_run(where: str, tmp_path: Path) -> None:
    words = ("--model", "toy", where, "toy:oracle", "--concurrency", 4, "--resume")
    done = run("bench", *words, "--out", tmp_path)
    assert done.code == 2 and "leave out --resume" in done.err
