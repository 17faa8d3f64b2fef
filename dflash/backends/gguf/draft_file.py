"""A draft's file beside its target's: read, and checked before llama.cpp sees either."""

from __future__ import annotations

from dflash.backends.gguf.eagle_file import EagleFile, check_eagle, read_eagle
from dflash.backends.gguf.sidecar import Sidecar, read_sidecar
from dflash.backends.gguf.validate import check_files
from dflash.gguf_file import Header

DraftFile = Sidecar | EagleFile


def read_draft(target: Header, draft: Header) -> DraftFile:
    """The draft behind its header, which fits ``target``.

    Raises CheckpointError, WeightsError, PairError.
    """
    if draft.architecture == "eagle3":
        eagle = read_eagle(draft)
        check_eagle(target, eagle)
        return eagle
    sidecar = read_sidecar(draft)
    check_files(target, sidecar)
    return sidecar
