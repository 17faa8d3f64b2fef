"""The MLX backend: targets are what mlx-lm loads, drafts are our own modules.

``open_pair`` is all that the rest of the package calls; importing this module imports no MLX.
Apple Silicon is what it is for; on Linux it runs on the CPU (``mlx[cpu]``), for tests.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from dflash.config import MTP
from dflash.errors import missing
from dflash.model_folders import seek

if TYPE_CHECKING:
    from dflash.backends.mlx.pair import MlxPair
    from dflash.config import LoadConfig

NEEDS = ("mlx", "mlx_lm")


def open_pair(load: LoadConfig) -> MlxPair:
    """Open the target of ``load`` and its draft, if it names one.

    Raises MissingBackend, CheckpointError, WeightsError, PairError, ConfigError, DownloadError.
    """
    absent = [name for name in NEEDS if find_spec(name) is None]
    if absent:
        raise missing(f"the mlx backend needs {', '.join(absent)}", "mlx")
    seek(load.target, None if load.draft == MTP else load.draft)
    from dflash.backends.mlx.pair import MlxPair

    return MlxPair.open(load)
