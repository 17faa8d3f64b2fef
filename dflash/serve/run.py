"""Runs the application under uvicorn, and ends it without losing an accepted request."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from types import FrameType
from typing import Any

import uvicorn
from sse_starlette.sse import AppStatus

from dflash.checks import counted
from dflash.engine import Engine
from dflash.errors import ConfigError
from dflash.serve.app import app_of
from dflash.serve.config import ServeConfig
from dflash.serve.protocol import Protocol
from dflash.serve.server import Server

POLL = 0.05  # seconds between looks at what still runs while draining
GRACE = 3.0  # seconds for clients to read that what they wait for was ended


class Runner(uvicorn.Server):
    """uvicorn, which on a signal first lets accepted requests finish, or ends them in time."""

    def __init__(self, server: Server, say: Callable[[str], None] | None = None) -> None:
        """Listens where the server's config says, once ``run`` is called.

        ``say`` hears where that is, and what it waits for after a signal.
        """
        config = server.config
        self._server, self._say = server, say or (lambda _: None)
        self.cut = False  # a second signal ended what ran
        super().__init__(
            uvicorn.Config(
                app_of(server),
                http=_http(),
                host=config.host,
                port=config.port,
                log_level="warning",
                server_header=False,
                timeout_graceful_shutdown=None,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's
        """The first signal drains, the second ends what runs now, a third the process.

        The first is not raised again afterwards, as uvicorn would: a server that was told to stop
        and stopped has done what it was told.
        """
        if self.should_exit:
            self.cut = True
            signal.signal(sig, signal.SIG_DFL)
        self._server.worker.drain()
        self.should_exit = True

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Listen, and say where."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started:
            address = self.servers[0].sockets[0].getsockname()
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            self._say(f"{self._server.name} at http://{host}:{address[1]}/v1")

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Wait for accepted requests, at most as long as the config says; then end them."""
        until = time.monotonic() + self._server.config.drain_seconds
        draining = asyncio.ensure_future(self._drain(until))
        leaving = asyncio.ensure_future(self._leave(draining, until))
        await super().shutdown(sockets)  # type: ignore[arg-type]
        await draining
        leaving.cancel()

    async def _drain(self, until: float) -> None:
        worker = self._server.worker
        if left := len(self.server_state.tasks):
            self._say(
                f"stopping: waiting for {counted(left, 'request')}, "
                f"{self._server.config.drain_seconds:g} s at most. Ctrl-C once more ends them now"
            )
        while (worker.running or worker.waiting) and await self._is_patient(until):
            pass
        await asyncio.to_thread(worker.stop)

    async def _leave(self, draining: asyncio.Future[None], until: float) -> None:
        """In the end go without clients that do not read what they are told."""
        await draining
        while await self._is_patient(until):
            pass
        await asyncio.sleep(GRACE)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _is_patient(self, until: float) -> bool:
        """Whether to wait on, after a moment of waiting."""
        await asyncio.sleep(POLL)
        return not self.cut and time.monotonic() < until


def _http() -> Any:
    """Our protocol, or httptools' where that is installed: it is faster."""
    return "auto" if find_spec("httptools") else Protocol


def check_address(config: ServeConfig) -> None:
    """Raise ConfigError where nobody can listen: better now than after a model is loaded."""
    try:
        found = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
    except (OSError, UnicodeError) as problem:  # a host may be no name at all
        why = (getattr(problem, "strerror", None) or str(problem)).lower()
        raise ConfigError(
            f"cannot listen at {config.host}, port {config.port}: {why}. Choose another --port "
            "(0 = any free one) or --host"
        ) from problem


def serve(
    engine: Engine,
    config: ServeConfig | None = None,
    no_draft: str | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Serve ``engine`` until a signal says stop. The engine stays open.

    ``no_draft``: why there is no draft although one was asked for, for /health and replies.
    ``say`` is told the address once requests are taken, and what is waited for after a signal.
    Raises ConfigError where the address cannot be listened at, KeyboardInterrupt after a second
    signal.
    """
    check_address(config or ServeConfig())
    AppStatus.enable_automatic_graceful_drain = False  # streams end when their requests do
    assert threading.current_thread() is threading.main_thread(), "signals reach the main thread"
    runner = Runner(Server(engine, config or ServeConfig(), no_draft), say)
    runner.run()
    if runner.cut:
        raise KeyboardInterrupt
