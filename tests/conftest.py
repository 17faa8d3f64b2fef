"""For every test: one thread, no network, none of the user's settings."""

import os
from pathlib import Path

import pytest

# Before any test module imports an array library, which reads these once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def _no_users_profiles(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tests measure stays with them, and what the user measured does not reach them."""
    place: list[Path] = []

    def folder() -> Path:
        if not place:
            place.append(tmp_path_factory.mktemp("profiles"))
        return place[0]

    monkeypatch.setattr("dflash.profiles.folder", folder)


@pytest.fixture(autouse=True)
def _no_user_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DFLASH_BLOCK_SIZE", "DFLASH_CACHE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
