"""The pair's draft as llama.cpp reads it: converted once, kept in the cache."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from dflash import env
from dflash.backends.gguf.taps import is_native
from dflash.config import split_draft
from dflash.convert.gguf import write
from dflash.convert.hf import read
from dflash.drafts.keys import read_config
from dflash.drafts.kinds import kind_of
from dflash.gguf_file import read_header

STORED = "Q8_0"  # as people run drafts there


def sidecar_of(draft: str | None, target: Path) -> Path | None:
    """The sidecar of ``draft`` for ``target``; None where llama.cpp could not draft with it.

    Raises CheckpointError, PairError and MissingBackend as the conversion does.
    """
    folder = Path(split_draft(draft or "none")[0])
    if not folder.is_dir() or kind_of(read_config(folder)) not in ("dflash", "dflash2"):
        return None
    if not is_native(read_header(target).architecture):
        return None
    out = env.cache_dir() / "bench" / f"{folder.name}-{_print(folder, target)}.{STORED}.gguf"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(".part.gguf")
        write(read(folder), part, target, STORED)
        part.rename(out)
    return out


def _print(folder: Path, target: Path) -> str:
    """Changes with the files."""
    files = [target, *sorted(folder.glob("*.safetensors")), folder / "config.json"]
    told = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return sha256(repr(told).encode()).hexdigest()[:12]
