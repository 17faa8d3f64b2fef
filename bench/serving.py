"""A server of its own process for measurements: started, waited for, stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, Queue
from threading import Thread
from typing import IO

READY = " at http://"


@contextmanager
def served(flags: Sequence[str], log: IO[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``dflash serve`` with ``flags`` on a free port: its process and address; ends with it.

    What it says goes to ``log``.
    """
    command = [sys.executable, "-m", "dflash", "serve", "--port", "0", *flags]
    address: Queue[str] = Queue()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        reader = Thread(target=_read, args=(server.stderr, log, address))
        reader.start()
        try:
            yield server, _first(address)
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                raise SystemExit("the server did not end within a minute of SIGTERM") from None
            finally:
                reader.join()


def _read(said: IO[str], log: IO[str], address: Queue[str]) -> None:
    for line in said:
        log.write(line)
        if READY in line:
            address.put(line.partition(" at ")[2].strip().removesuffix("/v1"))
    address.put("")


def _first(address: Queue[str]) -> str:
    try:
        found = address.get(timeout=300)
    except Empty:
        found = ""
    if not found:
        raise SystemExit("the server did not start; its log says why")
    return found
