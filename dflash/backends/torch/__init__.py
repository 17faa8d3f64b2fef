"""The torch backend: targets are what transformers loads, drafts are our own modules.

``open_pair`` is all that the rest of the package calls; importing this module imports no torch.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from dflash.errors import MissingBackend

if TYPE_CHECKING:
    from dflash.backends.torch.pair import TorchPair
    from dflash.config import LoadConfig

NEEDS = ("torch", "transformers", "safetensors", "tokenizers")


def open_pair(load: LoadConfig) -> TorchPair:
    """Open the target of ``load`` and its draft, if it names one.

    Raises MissingBackend, CheckpointError, WeightsError, PairError, ConfigError, DownloadError,
    OutOfMemory.
    """
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise MissingBackend(
            f"the torch backend needs {', '.join(missing)}: pip install 'dflash-engine[torch]'"
        )
    from dflash.backends.torch.pair import TorchPair

    return TorchPair.open(load)
