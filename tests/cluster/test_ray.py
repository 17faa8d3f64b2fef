"""Our engine on two replicas of Ray Serve on this machine: one address, the library's text.

Runs where Ray is installed: ``make test-ray`` makes such an environment.
"""

from __future__ import annotations

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import dflash
from dflash.cluster import launch, ray
from dflash.cluster.pair import make_plan
from dflash.errors import ConfigError
from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer
from tests.cluster.serving import free_port, post, serve
from tests.facades.drafts import save_draft

PROMPTS = [f"the cat sat on the mat {i} times and the" for i in range(8)]
GREEDY: dict[str, Any] = {"max_tokens": 16, "temperature": 0}
SEEDED: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "seed": 7}
LOADING = 300  # seconds; two replicas import torch on one core


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    target = save_target(tiny_target("llama"), tiny_tokenizer(), folder / "target")
    return str(target), str(save_draft(folder / "draft"))


def expected(pair: tuple[str, str], **options: Any) -> list[str]:
    with dflash.load(*pair, profile=False) as engine:
        return [engine.generate(p, chat_template=False, **options).text for p in PROMPTS]


def streamed(url: str, body: dict[str, Any]) -> str:
    request = urllib.request.Request(
        url, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        lines = [line.decode().strip().removeprefix("data: ") for line in reply]
    assert lines[-2] == "[DONE]" or "[DONE]" in lines
    frames = [json.loads(line) for line in lines if line.startswith("{")]
    return "".join(c["text"] for frame in frames for c in frame["choices"])


@pytest.mark.ray
@pytest.mark.slow
def test_two_replicas_say_what_the_library_says(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")  # each line, to see which replica it is of
    plan = make_plan(*pair, 4, port=free_port(), data_parallel=2, served_name="tiny")
    command = ray.render(plan)
    seen: dict[str, Any] = {}

    def use(url: str) -> None:
        asked = f"{url}/completions"
        with ThreadPoolExecutor(8) as clients:
            for name, options in (("greedy", GREEDY), ("seeded", SEEDED)):
                bodies = [{"prompt": p, **options} for p in PROMPTS]
                replies = list(clients.map(lambda body: post(asked, body), bodies))
                seen[name] = [reply["choices"][0]["text"] for reply in replies]
                seen[f"{name} metrics"] = replies[0]["metrics"]["speculative_decoding"]
            seen["streamed"] = list(
                clients.map(lambda p: streamed(asked, {"prompt": p, **GREEDY}), PROMPTS)
            )
        with urllib.request.urlopen(f"{url}/models") as reply:
            seen["models"] = [model["id"] for model in json.load(reply)["data"]]

    lines = serve(command, use, ready=LOADING)
    assert seen["greedy"] == expected(pair, **GREEDY)
    assert seen["seeded"] == expected(pair, **SEEDED)
    assert seen["streamed"] == seen["greedy"]
    assert seen["models"] == ["tiny"]
    assert seen["greedy metrics"]["block_size"] == 4
    assert seen["greedy metrics"]["speculated"]
    posts = [line for line in lines if "POST /v1/completions 200" in line]
    replicas = set(re.findall(r"ServeReplica:dflash:dflash pid=(\d+)", "\n".join(posts)))
    assert len(replicas) == 2, posts
    assert not launch.answers(command.health)


@pytest.mark.parametrize(
    "given", [{"replicas": "0"}, {"replicas": "many"}, {"modle": "x"}, {"block_size": "big"}]
)
def test_arguments_of_the_application_are_checked(given: dict[str, str]) -> None:
    from dflash.cluster.ray_app import Asked

    with pytest.raises(ConfigError):
        Asked.of(given)


def test_arguments_may_come_as_text_from_a_command_line() -> None:
    from dflash.cluster.ray_app import Asked

    asked = Asked.of({"replicas": "2", "block_size": "auto", "threads": "1"})
    assert (asked.replicas, asked.block_size, asked.threads) == (2, "auto", 1)
    assert Asked.of({"block_size": "6"}).block_size == 6


def test_a_replica_is_the_servers_own_application() -> None:
    from fastapi.testclient import TestClient

    from dflash.cluster.ray_app import Asked, replica

    asked = Asked(model="toy", draft="toy:oracle", block_size=4, served_name="m", threads=None)
    with TestClient(replica(asked), base_url="http://anywhere") as client:
        health = client.get("/health").json()
        assert (health["model"], health["block_size"]) == ("m", 4)
        reply = client.post("/v1/completions", json={"prompt": Path("x").name, **GREEDY})
        assert reply.status_code == 200


def test_the_name_of_the_config_stands_for_the_application() -> None:
    config = json.loads(ray.render(make_ray_plan()).files[ray.CONFIG])
    module, _, name = config["applications"][0]["import_path"].partition(":")
    from importlib import import_module

    assert callable(getattr(import_module(module), name))


def make_ray_plan() -> Any:
    from dflash.cluster.plan import Plan

    return Plan("owner/target")
