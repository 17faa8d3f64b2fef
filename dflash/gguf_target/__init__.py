"""GGUF files as targets: converted once to a Hugging Face folder in the cache.

Weights are dequantised by the ``gguf`` package, tensor by tensor, so memory stays at one shard.
The folder (config, safetensors shards, tokenizer, generation config) is written beside its place
and renamed, so what has a final name is whole; its name is a fingerprint of the file, the dtype
and the version of this conversion. The second start reads safetensors and nothing else. Backends
lend their array library, see `weights.Library`; the folder is the same whichever it was.

Not covered: mixture-of-experts files, vision parts, architectures outside ``config.FAMILIES``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash import env
from dflash.checks import readable
from dflash.errors import CheckpointError, MissingBackend
from dflash.gguf_file import read_header
from dflash.gguf_target.config import generation_config, model_config
from dflash.gguf_target.tokenizer import build_tokenizer
from dflash.gguf_target.weights import (
    BYTES,
    Library,
    Source,
    check_names,
    count_of,
    write_weights,
)

FORMAT = 1  # raise it when the same file would convert to something else
SAMPLE = 1 << 20  # bytes hashed at each of the sampled places of a file
STALE = 24 * 3600  # seconds after which an unfinished conversion is somebody's remains

READ_ERRORS = (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError, MemoryError)


def convert(
    file: Path, dtype: str, library: Callable[[], Library], cache: Path | None = None
) -> Path:
    """The Hugging Face folder of ``file`` in ``dtype``, converted now or found in ``cache``.

    ``library`` is asked for only where something is converted.

    Raises CheckpointError for files that are damaged or of an unsupported architecture,
    MissingBackend without the gguf package.
    """
    place = (cache or env.cache_dir()) / "gguf" / f"{file.stem}-{fingerprint(file, dtype)}"
    if place.is_dir():
        return place
    reader = read(file)
    meta = dict(reader.fields.items())
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = model_config(meta, tensors, file.name)
    lent = library()
    names = check_names(config, tensors, file.name, lent)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _require_disk(place.parent, count_of(names) * BYTES[dtype])
        with _workspace(place) as folder:
            config.save_pretrained(folder)
            tokenizer = build_tokenizer(meta, file)
            tokenizer.save_pretrained(folder)
            finish = generation_config(meta, getattr(tokenizer, "chat_template", None))
            (folder / "generation_config.json").write_text(json.dumps(finish, indent=2))
            with progress(f"Converting {file.name} (once)") as advance:
                write_weights(folder, Source(config, tensors, names), dtype, lent, advance)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the converted model to {place.parent}: {error}. Set DFLASH_CACHE to a "
            "folder with room"
        ) from error
    return place


def fingerprint(file: Path, dtype: str) -> str:
    """16 hex digits of size, dtype, conversion version and samples across ``file``."""
    size = file.stat().st_size
    digest = hashlib.sha256(f"{FORMAT} {size} {dtype}".encode())
    with file.open("rb") as stream:
        for part in range(9):
            stream.seek(max(0, size - SAMPLE) * part // 8)
            digest.update(stream.read(SAMPLE))
    return digest.hexdigest()[:16]


def read(file: Path) -> Any:
    """A gguf.GGUFReader over ``file``. Raises CheckpointError, MissingBackend."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise MissingBackend("GGUF files need the gguf package: pip install gguf") from error
    try:
        return GGUFReader(file)
    except READ_ERRORS as error:
        read_header(file)  # says it in its own words, if it sees it too
        raise CheckpointError(
            f"{file} is damaged or incomplete ({error}). Download it again"
        ) from error


def _require_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"the converted model needs {readable(needed)} in {folder}, {readable(free)} are "
            "free. Set DFLASH_CACHE to a folder with room"
        )


@contextmanager
def _workspace(place: Path) -> Iterator[Path]:
    """A folder that becomes ``place`` if the body ends well, and nothing otherwise."""
    for left in place.parent.glob(f".{place.name}-*"):
        if time.time() - left.stat().st_mtime > STALE:
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp makes private folders; a cache may be shared
        try:
            folder.rename(place)
        except OSError:
            if not place.is_dir():  # somebody else was faster: theirs is as good
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def progress(title: str) -> Iterator[Any]:
    """A bar on a terminal's standard error; yields ``advance(done, total)``."""
    if not sys.stderr.isatty() or env.in_ci():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)
