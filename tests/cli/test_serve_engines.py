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
from tests.drafts.configs import config


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


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks the hub fails the test; nothing forbids asking."""
    import huggingface_hub

    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", asked)


IDS = ("--model", "owner/Some-8B", "--draft", "owner/Some-8B-DFlash-b12")


@pytest.mark.usefixtures("no_hub")
def test_printing_asks_no_hub_and_says_what_it_took_from_a_name() -> None:
    found = run("serve", "--engine", "vllm", *IDS, "--print")
    assert found.code == 0, found.err
    words = shlex.split(found.out)
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert speculative == {"method": "dflash", "model": IDS[3], "num_speculative_tokens": 11}
    assert "nothing was checked" in found.err
    assert "it is a dflash draft of block 12" in found.err
    eagle = printed("--engine", "sglang", *IDS[:3], "owner/Some-8B-EAGLE3")
    assert _after(eagle, "--speculative-algorithm") == "EAGLE3"
    assert any("eagle3 draft of block 4" in line for line in eagle["notes"])


@pytest.mark.usefixtures("no_hub")
def test_a_draft_that_is_here_says_itself_what_it_is_beside_a_target_that_is_not(
    pair: tuple[str, ...],
) -> None:
    command = printed("--engine", "sglang", *IDS[:2], *pair[2:])
    assert _after(command, "--speculative-num-draft-tokens") == "8"
    assert [line for line in command["notes"] if "not here" in line] == [
        "owner/Some-8B: not here, and --print asks no hub, so nothing was checked"
    ]
    plain = printed("--engine", "vllm", *IDS[:2], "--draft", "none")
    assert "--speculative-config" not in plain["argv"]


@pytest.mark.usefixtures("no_hub")
def test_the_target_of_a_draft_that_is_not_here_has_to_be_named() -> None:
    found = run("serve", "--engine", "vllm", *IDS[2:], "--print")
    assert found.code == 2
    assert "name it (--model)" in found.err


def test_a_config_in_the_hubs_cache_is_read_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    kept = {"owner/T": TARGET, "owner/D": config(vocab_size=777)}
    places = {name: folder(tmp_path / name[-1], content) for name, content in kept.items()}
    monkeypatch.setattr(
        huggingface_hub,
        "try_to_load_from_cache",
        lambda name, file: f"{places[name]}/{file}" if name in places else None,
    )
    found = run("serve", "--engine", "vllm", "--model", "owner/T", "--draft", "owner/D", "--print")
    assert found.code == 2
    assert "777" in found.err


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


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("DFlash2-b8", "dflash2"), ("dflash-2", "dflash2"), ("DFlash-2B", "dflash")),
        *(("DFlash-27B", "dflash"), ("DFlash-2.5B", "dflash"), ("EAGLE-3-LLaMA", "eagle3")),
    ],
)
def test_a_size_in_a_drafts_name_is_no_version_of_its_method(name: str, method: str) -> None:
    command = printed("--engine", "vllm", *IDS[:3], f"owner/Some-{name}")
    assert any(f"it is a {method} draft" in line for line in command["notes"])


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("target", ["", "nowhere", "/no/where", "own er/na me"])
def test_a_target_that_can_be_none_is_said_also_where_the_draft_is_away(target: str) -> None:
    found = run("serve", "--engine", "vllm", "--print", "--model", target, *IDS[2:])
    assert found.code in (1, 2) and not found.out
    assert found.err.startswith("error: ") and "fault of ours" not in found.err
