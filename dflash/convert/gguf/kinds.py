"""Which architecture a kind of draft has. A new one is a file, and one line here."""

from __future__ import annotations

from dflash.convert.gguf.architecture import Architecture
from dflash.convert.gguf.dflash import DFlashSidecar
from dflash.convert.gguf.eagle3 import Eagle3Sidecar

KINDS: dict[str, Architecture] = {
    "dflash": DFlashSidecar(),
    "dflash2": DFlashSidecar(),
    "eagle3": Eagle3Sidecar(),
}
"""By the kind of a draft."""
ARCHITECTURES = {one.name: one for one in KINDS.values()}
"""By what a file says of itself."""
