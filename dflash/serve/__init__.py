"""A pair over HTTP, in the words of OpenAI's and Anthropic's APIs. Needs the extra ``serve``.

    app = create_app(dflash.load())        # an ASGI application

``dflash serve`` runs it. It serves a handful of people: requests take turns, a pass each; for many
at once put the same pair behind vLLM or SGLang (``dflash serve --engine``).
"""

from __future__ import annotations

from dflash.serve.app import create_app
from dflash.serve.config import ServeConfig
from dflash.serve.run import serve

__all__ = ["ServeConfig", "create_app", "serve"]
