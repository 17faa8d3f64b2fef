"""``dflash serve --engine``: the command is printed, or started once the pair has been checked."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import run
from tests.cluster.test_pair import TARGET, draft_of, folder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, ...]:
    target = folder(tmp_path / "target", TARGET)
    return ("--model", target, "--draft", draft_of(tmp_path))


def printed(*words: object) -> dict[str, Any]:
    found = run("serve", *words, "--print", "--json")
    assert found.code == 0, found.err
    command: dict[str, Any] = json.loads(found.out)
    return command


def test_the_printed_command_is_a_line_for_a_shell(pair: tuple[str, ...]) -> None:
    found = run("serve", "--engine", "vllm", *pair, "--block-size", 4, "--print")
    words = shlex.split(found.out)
    assert words[:3] == ["vllm", "serve", pair[1]]
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert speculative == {"method": "dflash", "model": pair[3], "num_speculative_tokens": 3}


def test_draft_tokens_and_the_environment_say_the_block_size_too(
    pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_BLOCK_SIZE", "5")
    sglang = ("--engine", "sglang", *pair)
    assert _after(printed(*sglang), "--speculative-num-draft-tokens") == "5"
    by_flag = printed(*sglang, "--draft-tokens", 2)
    assert _after(by_flag, "--speculative-num-draft-tokens") == "3"


def test_a_block_of_the_environment_that_an_engine_cannot_have_is_named(
    pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("serve", "--engine", "vllm", "--print")
    monkeypatch.setenv("DFLASH_BLOCK_SIZE", "1")
    refused = run(*flags, *pair)
    assert refused.code == 2
    assert "DFLASH_BLOCK_SIZE=1" in refused.err
    by_flag = run(*flags, *pair, "--block-size", 1)
    assert (by_flag.code, "DFLASH_BLOCK_SIZE" in by_flag.err) == (2, False)
    assert run(*flags, *pair[:2], "--draft", "none").code == 0


def _after(command: dict[str, Any], flag: str) -> str:
    argv: list[str] = command["argv"]
    return argv[argv.index(flag) + 1]


def test_a_ray_config_is_printed_before_its_command(pair: tuple[str, ...]) -> None:
    found = run("serve", "--engine", "ray", *pair, "--data-parallel-size", 2, "--print")
    config = json.loads(found.out[found.out.index("{") : found.out.rindex("}") + 1])
    assert config["applications"][0]["args"]["replicas"] == 2
    assert found.out.splitlines()[-1].startswith("serve run ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--engine", "nothing"), "llama-server, ray, sglang, vllm"),
        (("--engine", "ray", "--replica", "nothing"), "dflash, vllm"),
        (("--print",), "only together with --engine"),
        (("--tensor-parallel-size", 2), "only together with --engine"),
        (("--engine", "vllm", "--api-key-file", "keys"), "--engine-arg"),
        (("--engine", "vllm", "--max-running", 2), "--max-running"),
        (("--engine", "vllm", "--block-size", 4, "--draft-tokens", 3), "--draft-tokens"),
        (("--engine", "llama-server"), "none"),
    ],
)
def test_what_would_be_ignored_or_cannot_be_is_refused(
    pair: tuple[str, ...], words: tuple[Any, ...], says: str
) -> None:
    found = run("serve", *pair, *words)
    assert found.code != 0
    assert found.err.count("error:") == 1
    assert says in found.err


def test_a_pair_that_does_not_fit_starts_nothing(tmp_path: Path) -> None:
    target = folder(tmp_path / "target", TARGET)
    draft = draft_of(tmp_path, vocab_size=777)
    found = run("serve", "--engine", "vllm", "--model", target, "--draft", draft)
    assert found.code != 0
    assert "777" in found.err
    assert "vllm serve" not in found.err


def test_an_engine_that_is_not_installed_is_named(pair: tuple[str, ...], tmp_path: Path) -> None:
    found = run("serve", "--engine", "vllm", *pair, "--engine-env", tmp_path)
    assert found.code != 0
    assert "pip install vllm" in found.err


ENGINE = """#!{python}
import http.server, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        os.kill(os.getppid(), signal.SIGTERM)  # somebody stops the service
    def log_message(self, *parts):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
print("serving", sys.argv[2], os.environ.get("VLLM_USE_V2_MODEL_RUNNER"), flush=True)
server.serve_forever()
"""


def test_an_engine_is_started_heard_and_stopped(pair: tuple[str, ...], tmp_path: Path) -> None:
    program = tmp_path / "env" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text(ENGINE.replace("{python}", sys.executable), encoding="utf-8")
    program.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = ("--engine-env", tmp_path / "env")
    found = run("serve", "--engine", "vllm", *pair, "--port", port, *env, "--block-size", "auto")
    assert found.code == 0, found.err
    assert f"serving {pair[1]} None" in found.err
    assert f"ready: http://127.0.0.1:{port}/v1" in found.err
    assert "note: the engine has no block size 'auto'" in found.err
    assert os.getpid()  # this process outlived the signal
