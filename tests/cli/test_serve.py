"""``dflash serve``: flags and environment become a server, or one error before any loading."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import dflash.cli.serve
import dflash.serve
from dflash.engine import Engine
from dflash.errors import PairError
from tests.cli.running import run

TOY = ("serve", "--model", "toy", "--draft", "toy:oracle")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command would serve: engine, config, and why there is no draft."""
    found: list[Any] = []

    def serve(engine: Engine, config: Any, why: str | None, **_: Any) -> None:
        found.extend((engine.pair.draft_name, config, why))

    monkeypatch.setattr(dflash.serve, "serve", serve)
    monkeypatch.setattr(dflash.serve, "check_address", lambda _: None)  # port 8000 may be taken
    return found


def test_the_pair_is_loaded_in_a_thread_that_is_gone_when_it_is_served(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaders: list[threading.Thread] = []
    known = dflash.cli.serve.open_engine

    def watched(given: Any) -> Engine:
        loaders.append(threading.current_thread())
        return known(given)

    monkeypatch.setattr(dflash.cli.serve, "open_engine", watched)
    assert run(*TOY).code == 0
    assert started
    (loader,) = loaders
    assert loader is not threading.main_thread()
    assert not loader.is_alive()


@pytest.mark.parametrize("kind", [PairError, ValueError, SystemExit])
def test_what_goes_wrong_in_that_thread_is_heard(kind: type[BaseException]) -> None:
    """Of whatever kind: a thread swallows SystemExit without a word."""

    def fail() -> None:
        raise kind("of two kinds")

    with pytest.raises(kind, match="of two kinds") as caught:
        dflash.serve.apart(fail)
    assert caught.traceback[-1].name == "fail"


INTERRUPTED = """
import signal, threading, dflash.serve

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is born deaf to it

def load():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    threading.Event().wait()

try:
    dflash.serve.apart(load)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_loading_can_be_interrupted() -> None:
    found = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60
    )
    assert (found.returncode, found.stdout) == (0, "interrupted\n")


@pytest.mark.parametrize(
    ("environment", "flags", "size"),
    [
        (None, (), None),
        ("12", (), 12),
        ("auto", (), "auto"),
        ("12", ("--block-size", "5"), 5),
        ("12", ("--draft-tokens", "5"), 6),
        (None, ("--block-size", "auto"), "auto"),
    ],
)
def test_the_flag_wins_over_the_environment(
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    environment: str | None,
    flags: tuple[str, ...],
    size: Any,
) -> None:
    if environment is not None:
        monkeypatch.setenv("DFLASH_BLOCK_SIZE", environment)
    assert run(*TOY, *flags).code == 0
    assert started[1].block_size == size


@pytest.mark.parametrize("value", ["0", "-3", "many", "1.5"])
def test_a_bad_block_size_in_the_environment_refuses_to_start(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("DFLASH_BLOCK_SIZE", value)
    refused = run(*TOY)
    assert refused.code == 2 and not started
    assert "DFLASH_BLOCK_SIZE" in refused.err and value in refused.err


@pytest.mark.parametrize(
    "flags",
    [
        ("--block-size", "0"),
        ("--block-size", "4", "--draft-tokens", "3"),
        ("--port", "99999"),
        ("--max-running", "0"),
        ("--api-key-file", "no-such-file"),
    ],
)
def test_flags_that_make_no_sense_are_refused(started: list[Any], flags: tuple[str, ...]) -> None:
    assert run(*TOY, *flags).code == 2
    assert not started


def test_keys_come_from_a_file_and_the_environment(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\ntwo\n")
    monkeypatch.setenv("DFLASH_API_KEY", "three")
    assert run(*TOY, "--api-key-file", str(file)).code == 0
    assert set(started[1].api_keys) == {"one", "two", "three"}


def test_listening_to_everybody_without_a_key_is_pointed_out(started: list[Any]) -> None:
    said = run(*TOY, "--host", "0.0.0.0")
    assert said.code == 0 and "no key" in said.err


def test_a_draft_that_cannot_be_loaded_is_an_error_unless_told(started: list[Any]) -> None:
    flags = ("serve", "--model", "toy", "--draft", "toy:nonsense")
    assert run(*flags).code == 2 and not started
    said = run(*flags, "--allow-fallback")
    assert said.code == 0 and "draft: off" in said.err
    assert started[0] is None and "could not be loaded" in started[2]


def test_a_port_that_is_taken_is_one_error_before_any_loading() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = run("serve", "--model", "no/such-model", "--port", port)
    assert found.code == 2
    assert f"cannot listen at 127.0.0.1, port {port}: address already in use" in found.err
    assert "--port" in found.err and len(found.err.splitlines()) == 1


def test_a_host_that_is_none_is_one_error() -> None:
    found = run("serve", "--model", "toy", "--host", "no such host")
    assert found.code == 2 and "cannot listen at no such host" in found.err
