"""From what the user typed to a folder; GGUF files are converted once and cached."""

from __future__ import annotations

from pathlib import Path

from dflash.model_folders import target_folder


def resolve(path: str, *, code: bool = False, dtype: str = "float32") -> Path:
    """The folder behind ``path``, see `target_folder`; a GGUF file is converted to ``dtype``."""

    def convert(file: Path) -> Path:
        from dflash.backends.torch import gguf  # only GGUF users pay for the import

        return gguf.convert(file, dtype)

    return target_folder(path, convert, code=code)
