"""Kinds of draft in MLX: what each is made of. A new kind is a file or two, and one line here.

The config's side of the same table is `dflash.drafts.kinds.READERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash.registry import Registry

KINDS = Registry(
    "draft kind of the mlx backend",
    {
        "dflash": "dflash.backends.mlx.dflash_session:DFLASH",
        "dflash2": "dflash.backends.mlx.dflash2:DFLASH2",
        "eagle3": "dflash.backends.mlx.eagle3_session:EAGLE3",
        "mtp": "dflash.backends.mlx.mtp_session:HEAD",
    },
)


@dataclass(frozen=True, slots=True)
class DraftKind:
    """The two classes behind a kind; their relatives' signatures hold for both."""

    module: Callable[..., Any]  # (spec): an nn.Module with published parameter names
    session: Callable[..., Any]  # (module, tables, *, window): a DraftSession
