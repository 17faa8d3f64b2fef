"""What a start found equal, so that the next one need not find out again.

Whether fused layers give the logits of transformers' own depends on the model's config and on code,
never on its weights: so the comparison is made once for each config and each version of the
packages and files that take part, and an empty file in the cache folder says that it went well. One
that cannot be read or written costs the comparison, nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers

from dflash import env

FILES = (
    *("attention", "cache", "decoder", "forward", "fused", "gated", "narrow", "packed"),
    *("places", "products", "slots"),
)
"""Modules beside this one whose code decides what a fused pass computes."""


def place(config: Any, how: Iterable[str]) -> Path:
    """The file that stands for ``config`` (a transformers config) run as ``how`` says."""
    digest = sha256("\n".join((*how, torch.__version__, transformers.__version__)).encode())
    shape = {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}
    digest.update(json.dumps(shape, sort_keys=True, default=str).encode())
    for name in FILES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return env.cache_dir() / "checked" / digest.hexdigest()[:32]


def known(file: Path) -> bool:
    """Whether the comparison went well before."""
    return file.is_file()


def remember(file: Path) -> None:
    """It went well."""
    with suppress(OSError):  # a full or read-only disk: the next start compares again
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
