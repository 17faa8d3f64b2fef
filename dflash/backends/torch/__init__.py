"""The torch backend: targets are what transformers loads, drafts are our own modules.

``open_pair`` is all that the rest of the package calls; importing this module imports no torch.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dflash.config import MTP
from dflash.errors import ConfigError, missing
from dflash.model_folders import seek

if TYPE_CHECKING:
    from dflash.backends.torch.pair import TorchPair
    from dflash.config import LoadConfig

NEEDS = ("torch", "transformers", "safetensors", "tokenizers")


def open_pair(load: LoadConfig) -> TorchPair:
    """Open the target of ``load`` and its draft, if it names one.

    Raises MissingBackend, CheckpointError, WeightsError, PairError, ConfigError, DownloadError,
    OutOfMemory.
    """
    absent = [name for name in NEEDS if find_spec(name) is None]
    if absent:
        raise missing(f"the torch backend needs {', '.join(absent)}", "torch")
    device = load.device
    if device is not None and not re.fullmatch(r"cpu|(cuda|mps)(:\d+)?", device):
        raise ConfigError(f"device must be cpu, cuda, cuda:N or mps, got {device!r}")
    seek(load.target, None if load.draft == MTP else load.draft)
    from dflash.backends.torch.pair import TorchPair

    return TorchPair.open(load)
