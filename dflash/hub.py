"""The model hub, as far as names are concerned: is this one of its ids, and what is its config?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash import env
from dflash.drafts.keys import read_config
from dflash.errors import DownloadError, missing


def is_hub_id(name: str) -> bool:
    """Whether ``name``, no file or folder here, can be an id on the hub: owner/name."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def hub_config(name: str) -> dict[str, Any]:
    """config.json of a hub id, from the cache when offline.

    Raises DownloadError, MissingBackend, CheckpointError.
    """
    return read_config(hub_file(name, "config.json"))


def kept_config(name: str) -> dict[str, Any] | None:
    """The same where the hub's cache has it, without asking; None where it does not.

    Raises DownloadError for what cannot be a hub id, CheckpointError.
    """
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    with asking(name):  # an id that can be none
        kept = try_to_load_from_cache(name, "config.json")
    return read_config(Path(kept)) if isinstance(kept, str) else None


def hub_file(name: str, file: str) -> Path:
    """One file of a hub id, fetched on first use. Raises DownloadError, MissingBackend."""
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ImportError as problem:
        raise missing(f"{name} is no local folder, and hub ids need more packages", "hub") from (
            problem
        )
    if not env.offline():
        with asking(name):
            return Path(hf_hub_download(name, file))
    with asking(name):
        kept = try_to_load_from_cache(name, file)
    if not isinstance(kept, str):
        raise DownloadError(
            f"cannot fetch {name}: it is no local folder and not in the cache, and HF_HUB_OFFLINE "
            "forbids asking the hub"
        )
    return Path(kept)


@contextmanager
def asking(name: str) -> Iterator[None]:
    """The hub's own errors as DownloadError, by their first line."""
    try:
        yield
    except (OSError, ValueError) as problem:  # the hub's errors are OSErrors
        lines = str(problem).strip().splitlines() or [type(problem).__name__]
        raise DownloadError(f"cannot look at {name} on the hub: {lines[0]}") from problem
