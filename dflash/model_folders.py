"""From what the user typed to a folder of config and weights, before any weight is read.

A path or a hub id; a GGUF target goes through the converter that the backend hands in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dflash.checkpoint import CONVERT, fetch
from dflash.errors import CheckpointError
from dflash.gguf_file import insist_on_gguf
from dflash.hub import is_hub_id

PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def target_folder(path: str, convert: Callable[[Path], Path], *, code: bool = False) -> Path:
    """The Hugging Face folder behind ``path``: a folder, a ``.gguf`` file or a hub id.

    ``convert`` makes the folder of a GGUF file; ``code`` also fetches Python files from the hub
    (for ``trust_remote_code``). Raises CheckpointError for what is not there or of another kind,
    DownloadError for the hub.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return convert(_insist_on_gguf(place))
    if place.is_dir():
        if (place / "config.json").is_file():
            return place
        return convert(_only_gguf(place))
    return fetch(_target_id(path), code=code)


def draft_folder(path: str) -> Path:
    """The folder behind ``path``: a folder or a hub id. Raises CheckpointError, DownloadError."""
    place = Path(path).expanduser()
    if place.is_dir():
        return place
    if place.is_file():
        whole = (place.parent / "config.json").is_file()
        advice = f"give its folder {place.parent}" if whole else "give a draft's folder"
        if place.suffix == ".gguf":
            advice = (
                "a sidecar runs on llama.cpp beside its target's .gguf file (--backend gguf), or "
                f"as a folder: dflash convert {path} --to hf --out NEW"
            )
        raise CheckpointError(f"{path} is one file, not a draft folder; {advice}")
    return fetch(_draft_id(path))


def seek(target: str, draft: str | None = None) -> None:
    """Raise what the two above would for a name of nothing, here or on the hub.

    For a backend to ask before it imports a library for seconds: a config.json at most is fetched.
    """
    for path, id_of in ((target, _target_id), (draft, _draft_id)):
        if path is not None and not Path(path).expanduser().exists():
            fetch(id_of(path), wanted=["config.json"])


def _target_id(path: str) -> str:
    """``path``, which is nothing here, as a hub id. Raises CheckpointError."""
    if is_hub_id(path) and not path.endswith(".gguf"):
        return path
    hub = "" if "/" in path else " (a hub id is written owner/name)"
    raise CheckpointError(f"no such file or folder: {path}{hub}")


def _draft_id(path: str) -> str:
    """The same for a draft."""
    if is_hub_id(path):
        return path
    raise CheckpointError(f"no such draft folder: {path} (a hub id is written owner/name)")


def _insist_on_gguf(file: Path) -> Path:
    if file.suffix == ".safetensors":
        raise CheckpointError(f"{file} is one file of a checkpoint; give its folder {file.parent}")
    try:
        insist_on_gguf(file)
    except CheckpointError:
        if file.suffix in PICKLED:
            raise CheckpointError(f"{file} is not a GGUF file. {CONVERT}") from None
        raise
    return file


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
