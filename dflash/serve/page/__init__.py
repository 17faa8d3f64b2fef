"""The page at ``/``: HTML, style and scripts as they lie here, and nothing from anywhere else.

No build step: a browser reads the files as they are. What they may load is this server's alone, and
the policy sent with them says so.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
START = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache
def files() -> dict[str, tuple[bytes, str]]:
    """Name to content and media type; what is not here cannot be asked for."""
    found = sorted(path for path in HERE.iterdir() if path.suffix in KINDS)
    return {path.name: (path.read_bytes(), KINDS[path.suffix]) for path in found}
