"""A started server is waited for, heard, and never left behind."""

from __future__ import annotations

import os
import signal
import socket
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from dflash.cluster import launch
from dflash.cluster.plan import Command
from dflash.errors import LaunchError, MissingBackend

SERVER = """
import http.server, os, signal, sys

class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Handler.asked += 1
        self.send_response(200 if Handler.asked > 3 else 503)
        self.end_headers()

    def log_message(self, *parts):
        pass

{before}
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("listening", flush=True)
server.serve_forever()
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PAUSE", 0.02)


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def command(tmp_path: Path, port: int, before: str = "", program: str = SERVER) -> Command:
    script = tmp_path / "server.py"
    script.write_text(program.replace("{before}", textwrap.dedent(before)), encoding="utf-8")
    return Command(
        engine="fake",
        argv=(sys.executable, str(script), str(port)),
        url=f"http://127.0.0.1:{port}/v1",
        health=f"http://127.0.0.1:{port}/health",
        env={"FAKE_SETTING": "yes"},
        install="pip install fake",
    )


class Stopping:
    """Hears the lines; sends this process the signal once the server is ready."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        self.lines: list[str] = []
        self._number = number

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if line.startswith("ready:"):
            os.kill(os.getpid(), self._number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_is_waited_for_and_ended_by_a_signal(
    tmp_path: Path, port: int, number: int
) -> None:
    said = Stopping(number)
    before = signal.getsignal(number)
    started = command(tmp_path, port, 'print("setting", os.environ["FAKE_SETTING"])')
    launch.run(started, said)
    assert "setting yes" in said.lines  # its environment and its output
    assert f"ready: http://127.0.0.1:{port}/v1" in said.lines
    assert not launch.answers(started.health)
    assert signal.getsignal(number) is before


def test_a_server_that_ends_before_it_is_ready_is_an_error_with_its_words(
    tmp_path: Path, port: int
) -> None:
    started = command(tmp_path, port, 'print("no GPU found"); sys.exit(3)')
    with pytest.raises(LaunchError, match=r"before it was ready \(status 3\)(.|\n)*no GPU found"):
        launch.run(started, lambda line: None)


def test_a_server_that_ends_by_itself_later_is_an_error(tmp_path: Path, port: int) -> None:
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if line.startswith("ready:"):
            os.kill(int(lines[0]), signal.SIGKILL)  # as the kernel does when memory is out

    started = command(tmp_path, port, "print(os.getpid(), flush=True)")
    with pytest.raises(LaunchError, match=r"by itself \(status -9\)"):
        launch.run(started, say)


def test_a_server_that_never_answers_is_given_up_and_ended(tmp_path: Path, port: int) -> None:
    silent = "import signal, sys; print('loading', flush=True); signal.pause()"
    with pytest.raises(LaunchError, match=r"not ready after 0 s(.|\n)*--ready-timeout"):
        launch.run(command(tmp_path, port, program=silent), lambda line: None, ready=0.2)


def test_a_server_that_will_not_end_is_killed_with_its_children(tmp_path: Path, port: int) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    stubborn = f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        held = os.open({str(pipe)!r}, os.O_WRONLY)
        os.write(held, b"x")
        if os.fork() == 0:
            signal.pause()
    """
    said = Stopping()
    launch.run(command(tmp_path, port, stubborn), said, grace=0.2)
    assert any("did not end" in line for line in said.lines)
    os.set_blocking(reader, True)
    assert os.read(reader, 9) == b"x"
    assert os.read(reader, 9) == b""  # the end: nobody holds the other side any more
    os.close(reader)


def test_a_program_that_is_not_there_is_named_with_where_it_comes_from(
    tmp_path: Path, port: int
) -> None:
    missing = Command("fake", ("no-such-program",), "u", "http://127.0.0.1:9/h", install="pip x")
    with pytest.raises(MissingBackend, match=r"no-such-program(.|\n)*pip x(.|\n)*--engine-env"):
        launch.run(missing, lambda line: None)
    with pytest.raises(MissingBackend, match=str(tmp_path)):
        launch.run(missing, lambda line: None, place=tmp_path)


def test_a_missing_program_may_have_a_stand_in(tmp_path: Path) -> None:
    lines: list[str] = []
    missing = Command(
        "fake", ("no-such-program", "--x"), "u", "h", stand_in=("json", "python", "-m", "json.tool")
    )
    found = launch.at_home(missing, tmp_path, None, lines.append)
    assert found.argv[1:] == ("-m", "json.tool", "--x")
    assert lines == ["no no-such-program here, so the one in json"]


def test_files_of_a_command_are_written_and_named(tmp_path: Path) -> None:
    asked = Command("fake", ("python", "c.json"), "u", "h", files={"c.json": "{}"})
    found = launch.at_home(asked, tmp_path, None, lambda line: None)
    assert Path(found.argv[1]).read_text() == "{}"


def test_a_port_that_is_taken_is_an_error_before_anything_starts(tmp_path: Path, port: int) -> None:
    said: Any = Stopping()

    def second(line: str) -> None:
        if line.startswith("ready:"):
            with pytest.raises(LaunchError, match="another --port"):
                launch.run(started, lambda line: None)
        said(line)

    started = command(tmp_path, port)
    launch.run(started, second)
    assert any(line.startswith("ready:") for line in said.lines)
