"""``dflash`` and ``python -m dflash``: the command, and Ctrl-C before and after it.

While modules are imported nothing is open yet, and while Python shuts down nothing is any more: the
process ends at once there, with the code and the silence that the command itself has.
"""

from __future__ import annotations

import os
import signal
from typing import Any


def main() -> None:
    """Entry point of the ``dflash`` script."""
    _on_interrupt(_leave)
    from dflash.cli import main as run

    _on_interrupt(signal.default_int_handler)
    try:
        run()
    finally:
        _on_interrupt(_leave)


def _on_interrupt(then: Any) -> None:
    """A background job is born deaf to Ctrl-C, and stays it."""
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _leave):
        signal.signal(signal.SIGINT, then)


def _leave(*_: Any) -> None:
    os._exit(130)


if __name__ == "__main__":
    main()
