"""For every test: one thread, no network, none of the user's settings."""

import os

import pytest

# Before any test module imports an array library, which reads these once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def _no_user_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DFLASH_BLOCK_SIZE", "DFLASH_CACHE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
