"""The gguf backend: targets and drafts are GGUF files, llama.cpp computes, our loop decides.

``open_pair`` is all that the rest of the package calls; importing this module loads no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash.backends.gguf.pair import GgufPair
    from dflash.config import LoadConfig


def open_pair(load: LoadConfig) -> GgufPair:
    """Open the target of ``load`` and its draft, if it names one.

    Raises MissingBackend, CheckpointError, WeightsError, PairError, ConfigError, OutOfMemory.
    """
    from dflash.backends.gguf.pair import GgufPair

    return GgufPair.open(load)
