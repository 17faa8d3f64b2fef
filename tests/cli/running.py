"""Runs the command as a person would, in this process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import typer.testing
from typer.main import get_command

from dflash.cli import app

COMMAND = get_command(app)


@dataclass(frozen=True)
class Result:
    """What the shell sees."""

    code: int
    out: str
    err: str


def run(*words: object, typed: str | bytes | None = None, charset: str = "utf-8") -> Result:
    """``dflash WORDS``; an exception that got through the door fails the test."""
    found = invoke([str(word) for word in words], typed, charset=charset)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return Result(found.exit_code, found.stdout_bytes.decode(), plain(found.stderr))


def invoke(
    words: Sequence[str], typed: str | bytes | None = None, *, charset: str = "utf-8", **how: Any
) -> typer.testing.Result:
    """The command with ``words``, made once: its runner makes it for every call, which takes four
    times as long as all that follows."""
    with patch("typer.testing._get_command", lambda _: COMMAND):
        return typer.testing.CliRunner(charset=charset).invoke(app, words, input=typed, **how)


def plain(text: str) -> str:
    """Without colours and box drawing, spaces joined: what a person reads."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return " ".join(re.sub(r"[─│╭╮╰╯]", " ", text).split())


def apart(*words: object, **environment: str) -> tuple[int, str, set[str]]:
    """``dflash WORDS`` in a process of its own: exit code, what it says, modules it imported."""
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        "from dflash.cli import main\n"
        "main()\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    *lines, modules = said.stderr.splitlines()
    return said.returncode, plain("\n".join(lines)), set(modules.split())
