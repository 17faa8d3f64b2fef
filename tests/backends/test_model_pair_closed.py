"""A closed pair of loaded models says so, as an engine does."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from dflash.backends.torch import open_pair
from dflash.config import LoadConfig
from dflash.errors import EngineClosed

from .tiny import save_target, tiny_target, tiny_tokenizer

pytestmark = pytest.mark.torch


def test_a_closed_pair_opens_no_target(tmp_path: Path) -> None:
    folder = save_target(tiny_target("llama"), tiny_tokenizer(), tmp_path / "target")
    pair = open_pair(LoadConfig(str(folder), device="cpu"))
    pair.open_target(16).close()
    pair.close()
    pair.close()
    for call in (lambda: pair.open_target(16), pair.runs_on, pair.memory):
        with pytest.raises(EngineClosed, match="load a new one"):
            call()
