"""Runs the application under uvicorn, and ends it without losing an accepted request."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn
from sse_starlette.sse import AppStatus

from dflash.engine import Engine
from dflash.errors import ConfigError
from dflash.serve.app import app_of
from dflash.serve.config import ServeConfig
from dflash.serve.server import Server

POLL = 0.05  # seconds between looks at what still runs while draining


class Runner(uvicorn.Server):
    """uvicorn, which on a signal first lets accepted requests finish, or ends them in time."""

    def __init__(self, server: Server, ready: Callable[[str], None] | None = None) -> None:
        """Listens where the server's config says, once ``run`` is called; then ``ready`` hears."""
        config = server.config
        self._server, self._ready = server, ready
        self._again = False
        super().__init__(
            uvicorn.Config(
                app_of(server),
                host=config.host,
                port=config.port,
                log_level="warning",
                server_header=False,
                timeout_graceful_shutdown=None,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's
        """The first signal drains, the second ends what runs now.

        Neither is raised again afterwards, as uvicorn would: a server that was told to stop and
        stopped has done what it was told.
        """
        self._again = self.should_exit
        self._server.worker.drain()
        self.should_exit = True

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Listen, and say where."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started and self._ready is not None:
            address = self.servers[0].sockets[0].getsockname()
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            self._ready(f"{self._server.name} at http://{host}:{address[1]}/v1")

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Wait for accepted requests, at most as long as the config says; then end them."""
        draining = asyncio.ensure_future(self._drain())
        await super().shutdown(sockets)  # type: ignore[arg-type]
        await draining

    async def _drain(self) -> None:
        waited = 0.0
        worker = self._server.worker
        while (worker.running or worker.waiting) and waited < self._server.config.drain_seconds:
            if self._again:
                break
            await asyncio.sleep(POLL)
            waited += POLL
        await asyncio.to_thread(worker.stop)


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
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve ``engine`` until a signal says stop. The engine stays open.

    ``no_draft``: why there is no draft although one was asked for, for /health and replies.
    ``ready`` is told the address once requests are taken. Raises ConfigError where the address
    cannot be listened at.
    """
    check_address(config or ServeConfig())
    AppStatus.enable_automatic_graceful_drain = False  # streams end when their requests do
    assert threading.current_thread() is threading.main_thread(), "signals reach the main thread"
    Runner(Server(engine, config or ServeConfig(), no_draft), ready).run()
