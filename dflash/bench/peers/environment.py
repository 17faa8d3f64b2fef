"""An environment for the reference wheel, whose import name is ours: made once, in the cache."""

from __future__ import annotations

import platform
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dflash import env
from dflash.errors import DownloadError, MissingBackend

WHEEL = "dflash==0.1.0"
BESIDE = ("transformers==5.15.0", "safetensors", "numpy")  # the wheel's own pin, and what it needs
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def reference() -> Path:
    """Its interpreter. Raises MissingBackend without torch here, DownloadError when pip fails."""
    place = env.cache_dir() / "bench" / "reference-wheel"
    python = place / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    ready = place / ".installed"
    if ready.exists():
        return python
    try:
        torch = version("torch").partition("+")[0]
    except PackageNotFoundError as problem:
        raise MissingBackend(
            "the reference wheel is compared on torch: pip install 'dflash-engine[torch]'"
        ) from problem
    venv.create(place, with_pip=True, clear=True)
    _install(python, ["--no-deps", WHEEL])
    _install_torch(python, torch)
    _install(python, list(BESIDE))
    ready.touch()
    return python


def _install_torch(python: Path, torch: str) -> None:
    """The same version as here, as a CPU build where the default one brings CUDA."""
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        _install(python, [f"torch=={torch}+cpu", "--extra-index-url", TORCH_INDEX])
    else:
        _install(python, [f"torch=={torch}"])


def _install(python: Path, what: Sequence[str]) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = lines[-1] if lines else done.stderr.strip()[-300:]
        raise DownloadError(f"cannot install {what[0]} for the comparison: {why}")
