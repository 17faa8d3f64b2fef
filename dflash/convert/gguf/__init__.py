"""Drafts as GGUF sidecars, and back: what llama.cpp runs beside a GGUF target.

`architecture` is the seam: what llama.cpp calls a draft, its keys and its tensors. `dflash`
(DFlash, DFlash2) and `eagle3` fill it in; `write` and `read` work with any of them.
"""

from __future__ import annotations

from dflash.convert.gguf.read import config_of, read, tables_in
from dflash.convert.gguf.write import STORED, settled, write, write_sidecar

__all__ = [
    "STORED",
    "config_of",
    "read",
    "settled",
    "tables_in",
    "write",
    "write_sidecar",
]
