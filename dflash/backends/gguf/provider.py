"""Which package brings llama.cpp's library: xllamacpp, or llama-cpp-python.

DFLASH_GGUF_LIBRARY names one; otherwise xllamacpp is taken where it is installed. Nothing of the
Python modules is imported. One process runs one library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from dflash import env
from dflash.errors import ConfigError, MissingBackend

INSTALL = "pip install 'dflash-engine[gguf]'"


@dataclass(frozen=True, slots=True)
class Provider:
    """One package. Names are those of the package index and of the module."""

    package: str
    module: str
    patterns: tuple[str, ...]  # of the library, under the module's folder

    @property
    def folder(self) -> Path | None:
        """Where the module lies; None where it is not installed."""
        spec = find_spec(self.module)
        places = None if spec is None else spec.submodule_search_locations
        return None if not places else Path(next(iter(places)))

    def find(self) -> tuple[Path, str]:
        """The library's file, and the package's version. Raises MissingBackend."""
        folder = self.folder
        if folder is None:
            raise MissingBackend(f"{self.package} is not installed: {self._install}")
        files = [file for pattern in self.patterns for file in sorted(folder.glob(pattern))]
        if not files:
            raise MissingBackend(f"{folder} holds no library of llama.cpp: {self._install}")
        try:
            return files[0], metadata.version(self.package)
        except metadata.PackageNotFoundError as problem:
            raise MissingBackend(
                f"{folder} was not installed as the package {self.package}, so nothing says which "
                f"version it is: {self._install}"
            ) from problem

    @property
    def _install(self) -> str:
        return INSTALL if self is XLLAMACPP else f"pip install {self.package}"


XLLAMACPP = Provider(
    "xllamacpp", "xllamacpp", ("xllamacpp*.so", "xllamacpp*.pyd", "xllamacpp*.dylib")
)
LLAMA_CPP_PYTHON = Provider(
    "llama-cpp-python",
    "llama_cpp",
    ("lib/libllama.so", "lib/libllama.dylib", "lib/llama.dll", "lib/libllama.dll"),
)
PROVIDERS: Mapping[str, Provider] = {one.package: one for one in (XLLAMACPP, LLAMA_CPP_PYTHON)}


def choose() -> Provider:
    """The package asked for, or the first that is installed.

    Raises ConfigError for a name that is none, MissingBackend where none is installed.
    """
    asked = env.gguf_library()
    if asked is not None:
        if asked not in PROVIDERS:
            known = " or ".join(PROVIDERS)
            raise ConfigError(f"DFLASH_GGUF_LIBRARY must be {known}; it is {asked!r}")
        return PROVIDERS[asked]
    installed = [one for one in PROVIDERS.values() if one.folder is not None]
    if not installed:
        raise MissingBackend(f"the gguf backend needs {XLLAMACPP.package}: {INSTALL}")
    return installed[0]
