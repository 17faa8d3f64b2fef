"""DFlash: lossless speculative decoding with block-diffusion drafts.

    import dflash

    with dflash.load() as engine:                      # the demo pair; or load("target", draft=...)
        print(engine.generate("Why is the sky blue?", max_tokens=64).text)

Names are imported on first use, so ``import dflash`` costs milliseconds and no array library.
``DFlashDraftModel``, ``extract_context_feature``, ``load_and_process_dataset`` and ``sample`` keep
upstream's names and results (see ``dflash.model``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash.config import GenerateConfig, LoadConfig
    from dflash.core.stats import Stats
    from dflash.engine import Engine, load
    from dflash.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DFlashError,
        DownloadError,
        EngineClosed,
        MissingBackend,
        OutOfMemory,
        PairError,
        PromptError,
        UnknownName,
        WeightsError,
    )
    from dflash.model import (
        DFlash2DraftModel,
        DFlashDraftModel,
        extract_context_feature,
        load_and_process_dataset,
        sample,
    )
    from dflash.results import Chunk, Generation

_HOME = {
    "CheckpointError": "dflash.errors",
    "Chunk": "dflash.results",
    "ConfigError": "dflash.errors",
    "DFlash2DraftModel": "dflash.model",
    "DFlashDraftModel": "dflash.model",
    "DFlashError": "dflash.errors",
    "DataError": "dflash.errors",
    "DownloadError": "dflash.errors",
    "Engine": "dflash.engine",
    "EngineClosed": "dflash.errors",
    "GenerateConfig": "dflash.config",
    "Generation": "dflash.results",
    "LoadConfig": "dflash.config",
    "MissingBackend": "dflash.errors",
    "OutOfMemory": "dflash.errors",
    "PairError": "dflash.errors",
    "PromptError": "dflash.errors",
    "Stats": "dflash.core.stats",
    "UnknownName": "dflash.errors",
    "WeightsError": "dflash.errors",
    "extract_context_feature": "dflash.model",
    "load": "dflash.engine",
    "load_and_process_dataset": "dflash.model",
    "sample": "dflash.model",
}

__all__ = [
    "CheckpointError",
    "Chunk",
    "ConfigError",
    "DFlash2DraftModel",
    "DFlashDraftModel",
    "DFlashError",
    "DataError",
    "DownloadError",
    "Engine",
    "EngineClosed",
    "GenerateConfig",
    "Generation",
    "LoadConfig",
    "MissingBackend",
    "OutOfMemory",
    "PairError",
    "PromptError",
    "Stats",
    "UnknownName",
    "WeightsError",
    "extract_context_feature",
    "load",
    "load_and_process_dataset",
    "sample",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("dflash-engine")
        except PackageNotFoundError:
            return "0+source"  # a checkout that is not installed
    if name not in _HOME:
        raise AttributeError(f"module 'dflash' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
