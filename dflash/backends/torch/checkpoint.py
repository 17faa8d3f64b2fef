"""From what the user typed to a folder, before any weight is read.

A path or hub id becomes a Hugging Face folder; GGUF files are converted once and cached.
"""

from __future__ import annotations

from pathlib import Path

from dflash.checkpoint import CONVERT, fetch
from dflash.errors import CheckpointError


def resolve(path: str, *, code: bool = False, dtype: str = "float32") -> Path:
    """The Hugging Face folder behind ``path``: a folder, a ``.gguf`` file or a hub id.

    ``code`` also fetches Python files from the hub (for ``trust_remote_code``); a GGUF file is
    converted to ``dtype``.
    Raises CheckpointError for what is not there or of another kind, DownloadError for the hub.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return _convert(place, dtype)
    if place.is_dir():
        if (place / "config.json").is_file():
            return place
        return _convert(_only_gguf(place), dtype)
    if path.startswith((".", "/", "~")) or path.count("/") != 1 or path.endswith(".gguf"):
        hub = "" if "/" in path else " (a hub id is written owner/name)"
        raise CheckpointError(f"no such file or folder: {path}{hub}")
    return fetch(path, code=code)


def _convert(file: Path, dtype: str) -> Path:
    from dflash.backends.torch.gguf import convert  # only GGUF users pay for the import

    with file.open("rb") as stream:
        magic = stream.read(4)
    if file.suffix == ".safetensors":
        raise CheckpointError(f"{file} is one file of a checkpoint; give its folder {file.parent}")
    if magic != b"GGUF":
        raise CheckpointError(f"{file} is not a GGUF file. {CONVERT}")
    return convert(file, dtype)


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{folder} holds several GGUF files, name one of them: {names}")
    raise CheckpointError(
        f"{folder} has neither a config.json nor a .gguf file, so it is not a model folder"
    )
