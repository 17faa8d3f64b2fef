"""The only reader of environment variables.

DFLASH_CACHE        folder for downloads, converted weights and what earlier starts found out
DFLASH_BLOCK_SIZE   block size (anchor included) or "auto", below the command line in precedence
DFLASH_GGUF_LIBRARY package whose llama.cpp the gguf backend runs: xllamacpp or llama-cpp-python
DFLASH_API_KEY      a key that clients of ``dflash serve`` must send
CI                  plain output, no progress animation
NO_COLOR            no colours
RANK, WORLD_SIZE, LOCAL_RANK   which of how many processes this is, as torchrun sets them
HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE   never reach out to the hub
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from dflash.errors import ConfigError

MOST_DIGITS = 9  # of a number that anybody means
_OFF = {"", "0", "false", "no", "off"}


def flag(name: str) -> bool:
    """Whether ``name`` is set to anything but 0, false, no, off."""
    return os.environ.get(name, "").strip().lower() not in _OFF


def cache_dir() -> Path:
    """Where downloads and converted weights are kept (not created here)."""
    given = os.environ.get("DFLASH_CACHE")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dflash"


def block_size() -> int | Literal["auto"] | None:
    """DFLASH_BLOCK_SIZE, or None when unset. Raises ConfigError for what is not a block size."""
    text = os.environ.get("DFLASH_BLOCK_SIZE", "").strip()
    if not text:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal() or len(text) > MOST_DIGITS or int(text) < 1:
        raise ConfigError(
            f"DFLASH_BLOCK_SIZE must be 1 or more, or 'auto'; it is {text[: 2 * MOST_DIGITS]!r}"
        )
    return int(text)


def gguf_library() -> str | None:
    """DFLASH_GGUF_LIBRARY, or None when unset or empty."""
    return os.environ.get("DFLASH_GGUF_LIBRARY", "").strip() or None


def with_variables(added: Mapping[str, str]) -> dict[str, str]:
    """This process's environment and ``added``: for a program that is started."""
    return {**os.environ, **added}


def api_key() -> str | None:
    """DFLASH_API_KEY, or None when unset or empty."""
    return os.environ.get("DFLASH_API_KEY", "").strip() or None


def shard() -> tuple[int, int]:
    """(rank, number of processes) under torchrun; (0, 1) elsewhere. Raises ConfigError."""
    names = ("RANK", "WORLD_SIZE")
    texts = [os.environ.get(name, "").strip() for name in names]
    if not all(texts):
        return 0, 1
    if not all(text.isdecimal() for text in texts) or int(texts[0]) >= int(texts[1]):
        raise ConfigError(f"RANK={texts[0]} and WORLD_SIZE={texts[1]} do not name a process")
    return int(texts[0]), int(texts[1])


def local_rank() -> int:
    """Which of this machine's processes this is, under torchrun; 0 elsewhere."""
    text = os.environ.get("LOCAL_RANK", "").strip()
    return int(text) if text.isdecimal() else 0


def in_ci() -> bool:
    """Whether a continuous-integration run is reading the output."""
    return flag("CI")


def no_color() -> bool:
    """Whether colours are unwanted (https://no-color.org: set to anything but empty)."""
    return bool(os.environ.get("NO_COLOR"))


def offline() -> bool:
    """Whether reaching out to a model hub is forbidden."""
    return flag("HF_HUB_OFFLINE") or flag("TRANSFORMERS_OFFLINE")
