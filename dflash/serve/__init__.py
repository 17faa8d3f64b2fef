"""A pair over HTTP, in the words of OpenAI's and Anthropic's APIs. Needs the extra ``serve``.

    app = create_app(apart(dflash.load))        # an ASGI application

``dflash serve`` runs it. It serves a handful of people: requests take turns, a pass each; for many
at once put the same pair behind vLLM or SGLang (``dflash serve --engine``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash.serve.app import create_app
    from dflash.serve.config import ServeConfig
    from dflash.serve.loading import apart
    from dflash.serve.run import check_address, serve

_HOME = {
    "ServeConfig": "dflash.serve.config",
    "apart": "dflash.serve.loading",
    "check_address": "dflash.serve.run",
    "create_app": "dflash.serve.app",
    "serve": "dflash.serve.run",
}

__all__ = ["ServeConfig", "apart", "check_address", "create_app", "serve"]


def __getattr__(name: str) -> Any:
    """A name's module is imported when it is asked for: the queue needs no web framework."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
