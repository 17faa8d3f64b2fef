"""Runs the command as a person would, in this process."""

from __future__ import annotations

import re
from dataclasses import dataclass

from typer.testing import CliRunner

from dflash.cli import app


@dataclass(frozen=True)
class Result:
    """What the shell sees."""

    code: int
    out: str
    err: str


def run(*words: object, typed: str | bytes | None = None, charset: str = "utf-8") -> Result:
    """``dflash WORDS``; an exception that got through the door fails the test."""
    found = CliRunner(charset=charset).invoke(app, [str(word) for word in words], input=typed)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return Result(found.exit_code, found.stdout_bytes.decode(), plain(found.stderr))


def plain(text: str) -> str:
    """Without colours and box drawing, spaces joined: what a person reads."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return " ".join(re.sub(r"[─│╭╮╰╯]", " ", text).split())
