"""Messages of the library in the words of the command line: ``max_tokens`` is ``--max-tokens``.

The library names its options by their keywords. Here, and nowhere else, these become the flags of
the command that was typed; what stands in quotes or in a path is somebody's own and stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

OTHERWISE = {
    "target": "model",
    "tokens": "max_tokens",
    "most_running": "max_running",
    "most_waiting": "max_waiting",
    "most_tokens": "max_tokens",
    "most_seconds": "max_seconds",
}
"""Keywords of the library whose parameter has another name."""


def flags_of(parameters: Iterable[Any]) -> dict[str, str]:
    """Keyword of the library to flag, for a command's ``parameters`` (typer's)."""
    found = {
        one.name: next((name for name in one.opts if name.startswith("--")), None)
        for one in parameters
    }
    found |= {keyword: found[name] for keyword, name in OTHERWISE.items() if name in found}
    return {name: flag for name, flag in found.items() if flag is not None}


def in_flags(text: str, flags: Mapping[str, str]) -> str:
    """``text`` with ``flags`` instead of keywords."""
    for name, flag in flags.items():
        text = re.sub(rf"(?<![\w./'\"-]){name}=(['\"]?)([\w.-]+)\1", rf"{flag} \2", text)
        text = re.sub(_place(name), flag, text)
    return text


def _place(name: str) -> str:
    """Where ``name`` is a keyword: anywhere if no word of English looks like it."""
    if "_" in name:
        return rf"(?<![\w./'\"-]){name}(?![\w/'\"-]|\.\w)"
    begins = rf"(?:^|(?<= and )){name}(?= must | is empty| is not a setting| is the | and |:)"
    return rf"{begins}|(?<=[Ll]eave ){name}(?= out)"
