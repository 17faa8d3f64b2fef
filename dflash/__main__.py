"""``dflash`` and ``python -m dflash``: the command, and Ctrl-C before and after it.

While modules are imported nothing is open yet, and while Python shuts down nothing is any more: the
process ends at once there, with the code and the silence that the command itself has. So it does at
a second Ctrl-C while the first is on its way out.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def main() -> None:
    """Entry point of the ``dflash`` script."""
    _on_interrupt(_leave)
    from dflash.cli import main as run

    _on_interrupt(_interrupt)
    try:
        run()
    except KeyboardInterrupt:  # that came before the command's own door, or behind it
        _leave()
    finally:
        _on_interrupt(_leave)


def _on_interrupt(then: Any) -> None:
    """A background job is born deaf to Ctrl-C, and stays it."""
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _interrupt, _leave):
        signal.signal(signal.SIGINT, then)


def _interrupt(*_: Any) -> None:
    """Raises KeyboardInterrupt, unless one is being handled where the signal arrives."""
    handled: BaseException | None = sys.exception()
    while handled is not None:
        if isinstance(handled, KeyboardInterrupt):
            _leave()
        handled = handled.__context__
    raise KeyboardInterrupt


def _leave(*_: Any) -> None:
    os._exit(130)


if __name__ == "__main__":
    main()
