"""A worker process: one JSON object a line each way."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from dflash.bench.trial import Ask, Outcome
from dflash.errors import CheckpointError

WORKER = Path(__file__).with_name("worker.py")
RAISED = re.compile(r"\w*(\.\w+)*(Error|Exception|Exit)\b")  # a traceback's last line
PATIENCE = 20.0  # seconds a worker has to end by itself


class Peer(AbstractContextManager["Peer"]):
    """Another program, started and loaded."""

    def __init__(self, name: str, python: Path, told: Mapping[str, Any]) -> None:
        """Start it and wait until its model is there. Raises CheckpointError with what it said."""
        self._name = name
        errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._errors = errors  # closed with the peer
        self._process = subprocess.Popen(
            [str(python), str(WORKER), json.dumps(dict(told))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
        )
        try:
            self._read()
        except CheckpointError:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Let it end; it goes when its input does."""
        process = self._process
        if process.stdin is not None:
            with suppress(BrokenPipeError):  # it has ended, with a question unread
                process.stdin.close()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._errors.close()

    def answer(self, ask: Ask, tokens: int) -> Outcome:
        """One greedy answer. Raises CheckpointError when the program fails."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"ids": list(ask.ids), "tokens": tokens}) + "\n")
            self._process.stdin.flush()
        except OSError as problem:
            raise CheckpointError(self._last_words()) from problem
        found = self._read()
        made: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in found.items()}
        return Outcome(tokens=len(made["ids"]), prompt_tokens=len(ask.ids), **made)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise CheckpointError(self._last_words())
        found: dict[str, Any] = json.loads(line)
        return found

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        raised = [line for line in lines if RAISED.match(line)]
        said = (raised or lines or ["it ended without a word"])[-1]
        return f"{self._name} failed: {said}"
