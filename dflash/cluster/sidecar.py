"""Two GGUF files that llama.cpp's own server shall run: what it would abort at, seen before.

The checks are those of our gguf backend, which reads the same files.
"""

from __future__ import annotations

from pathlib import Path

from dflash.backends.gguf.draft_file import read_draft
from dflash.backends.gguf.taps import is_native
from dflash.errors import PairError
from dflash.gguf_file import read_header


def check(target: str, draft: str) -> None:
    """Raise PairError, CheckpointError or WeightsError for files that do not fit."""
    header = read_header(Path(target).expanduser())
    read_draft(header, read_header(Path(draft).expanduser()))
    if not is_native(header.architecture):
        raise PairError(
            f"llama.cpp's server cannot draft for a {header.architecture} target: it gets no "
            "features of its layers. Serve this pair without --engine: our gguf backend can"
        )
