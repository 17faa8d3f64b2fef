"""The only file that starts processes: start a server, wait until it answers, stop it cleanly.

Its output is passed on line by line. On SIGINT and SIGTERM the server is asked to end; what is left
of its process group after a grace is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from dflash import env
from dflash.cluster.plan import Command
from dflash.errors import LaunchError, MissingBackend

KEPT = 12  # lines of the server's output that an error repeats
PAUSE = 0.5  # seconds between questions whether it is ready
ANSWER = 2.0  # seconds such an answer may take

Say = Callable[[str], None]


def run(
    command: Command,
    say: Say,
    *,
    place: Path | None = None,
    ready: float = 1800.0,
    grace: float = 30.0,
) -> None:
    """Serve until a signal ends it. ``say`` gets every line of output and every note.

    place  folder of the Python environment that the engine is installed in; None = this one
    ready  seconds it may take to load the models
    grace  seconds between asking it to end and killing it

    Raises MissingBackend when the program is not installed, LaunchError when it ends by itself or
    is not ready in time; nothing of it is left running in any case.
    """
    if answers(command.health):
        raise LaunchError(f"something answers at {command.health} already: choose another --port")
    with tempfile.TemporaryDirectory(prefix="dflash-") as folder:
        found = at_home(command, Path(folder), place, say)
        with Server(found, say, grace) as server:
            if server.wait_ready(ready):
                say(f"ready: {command.url}")
            server.wait_end()


def at_home(command: Command, folder: Path, place: Path | None, say: Say) -> Command:
    """The command with its program found and its files written to ``folder``.

    Raises MissingBackend.
    """
    for name, text in command.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    argv = [str(folder / word) if word in command.files else word for word in command.argv]
    program = _program(argv[0], place)
    if program is None and command.stand_in and find_spec(command.stand_in[0]):
        package, *instead = command.stand_in
        say(f"no {argv[0]} here, so the one in {package}")
        program, argv = _program(instead[0], None), [*instead, *argv[1:]]
    if program is None:
        raise MissingBackend(
            f"there is no program {argv[0]!r} {f'in {place}' if place else 'here'}. It comes with: "
            f"{command.install}. --engine-env names the folder of such an environment, and "
            "--print shows the command for another machine"
        )
    return replace(command, argv=(program, *argv[1:]))


def _program(name: str, place: Path | None) -> str | None:
    """Beside this interpreter (an environment may be used without being activated), or on PATH."""
    if place is not None:
        return shutil.which(name, path=str(place / "bin"))
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


class Server:
    """A started process and the thread that reads what it prints. A context manager."""

    def __init__(self, command: Command, say: Say, grace: float) -> None:
        """Nothing runs before the ``with``."""
        self._command, self._say, self._grace = command, say, grace
        self._last: deque[str] = deque(maxlen=KEPT)
        self._stop = threading.Event()

    def __enter__(self) -> Server:
        """Start it in a process group of its own and take SIGINT and SIGTERM."""
        self._process = subprocess.Popen(
            self._command.argv,
            env=env.with_variables(self._command.env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._handlers = {s: signal.signal(s, self._asked) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        """End it, whatever happened, and give the signals back."""
        self._end()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def wait_ready(self, seconds: float) -> bool:
        """Until the health address answers 200; False = a signal came first. Raises LaunchError."""
        for _ in range(max(1, round(seconds / PAUSE))):
            self._check_alive("before it was ready")
            if answers(self._command.health):
                return True
            if self._stop.wait(PAUSE):
                return False
        raise LaunchError(
            f"{self._command.engine} was not ready after {seconds:.0f} s. Its last lines:\n"
            f"{self._tail()}\nIf it is only slow, give it more: --ready-timeout"
        )

    def wait_end(self) -> None:
        """Until a signal comes. Raises LaunchError when the process ends before."""
        while not self._stop.wait(PAUSE):
            self._check_alive("by itself")

    def _check_alive(self, when: str) -> None:
        if self._process.poll() is not None:
            self._reader.join(self._grace)
            raise LaunchError(
                f"{self._command.engine} ended {when} (status {self._process.returncode}). Its "
                f"last lines:\n{self._tail()}"
            )

    def _read(self) -> None:
        assert self._process.stdout is not None, "it was asked for a pipe"
        for line in self._process.stdout:
            self._last.append(line.rstrip("\n"))
            self._say(self._last[-1])

    def _tail(self) -> str:
        return "\n".join(f"  {line}" for line in self._last) or "  (it printed nothing)"

    def _asked(self, _: int, __: FrameType | None) -> None:
        self._stop.set()

    def _end(self) -> None:
        """Ask it to end; kill what is left of its group after the grace."""
        try:
            self._process.send_signal(signal.Signals[self._command.ending])
            self._process.wait(self._grace)
        except subprocess.TimeoutExpired:
            self._say(f"{self._command.engine} did not end in {self._grace:.0f} s: killed")
        self._signal(signal.SIGKILL)  # children that outlived it, too
        self._process.wait()
        self._reader.join(self._grace)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def answers(url: str) -> bool:
    """Whether ``url`` answers 200 now."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER) as reply:
            return bool(reply.status == 200)
    except OSError:  # refused, timed out, or an HTTP error
        return False
