"""Serve a plan, use it, and end it, all in a test's own thread."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from collections.abc import Callable
from typing import Any

from dflash.cluster import launch
from dflash.cluster.plan import Command


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def serve(command: Command, use: Callable[[str], None], ready: float = 60) -> list[str]:
    """Run the command; ``use`` gets the API's address once it is ready. All lines it printed."""
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if line == f"ready: {command.url}":
            use(command.url)
            os.kill(os.getpid(), signal.SIGTERM)

    launch.run(command, say, ready=ready)
    return lines


def post(url: str, body: dict[str, Any]) -> Any:
    """The JSON that answers ``body``."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)
