"""Which package's llama.cpp runs: the one asked for, else the first installed; never an unknown."""

from __future__ import annotations

import ctypes
from ctypes.util import find_library
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from dflash.backends.gguf import layout, provider
from dflash.backends.gguf.library import STAGING, Library, library
from dflash.errors import ConfigError, MissingBackend

VARIABLE = "DFLASH_GGUF_LIBRARY"
PACKAGES = {"xllamacpp": "xllamacpp", "llama-cpp-python": "llama_cpp"}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fake packages, and no others."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr("sys.path_importer_cache", {})
    for module in PACKAGES.values():
        monkeypatch.delitem(__import__("sys").modules, module, raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)

    def made(package: str, version: str = "1.2.3", file: str | None = None) -> Path:
        folder = tmp_path / PACKAGES[package]
        (folder / "lib").mkdir(parents=True)
        (folder / "__init__.py").write_text("raise AssertionError('imported')")
        about = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        about.joinpath("METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
        usual = "xllamacpp.abi3.so" if package == "xllamacpp" else "lib/libllama.so"
        if file != "":
            (folder / (file or usual)).touch()
        return folder

    return made


@pytest.mark.parametrize("package", PACKAGES)
def test_the_one_that_is_installed_is_taken(package: str, install: Any) -> None:
    folder = install(package, "4.5")
    file, version = provider.choose().find()
    assert (file.is_relative_to(folder), version) == (True, "4.5")


def test_of_two_it_is_xllamacpp_unless_the_other_is_asked_for(
    install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("llama-cpp-python")
    install("xllamacpp")
    assert provider.choose().package == "xllamacpp"
    monkeypatch.setenv(VARIABLE, "llama-cpp-python")
    assert provider.choose().find()[0].name == "libllama.so"


def test_what_is_not_there_is_one_error(
    install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingBackend, match="needs xllamacpp: pip install"):
        provider.choose()
    install("xllamacpp", file="")
    with pytest.raises(MissingBackend, match="holds no library"):
        provider.choose().find()
    (tmp_path / "xllamacpp" / "xllamacpp.so").touch()
    (tmp_path / "xllamacpp-1.2.3.dist-info" / "METADATA").unlink()
    (tmp_path / "xllamacpp-1.2.3.dist-info").rmdir()
    with pytest.raises(MissingBackend, match="was not installed as the package xllamacpp"):
        provider.choose().find()
    monkeypatch.setenv(VARIABLE, "llama-cpp-python")
    with pytest.raises(MissingBackend, match="llama-cpp-python is not installed: pip install lla"):
        provider.choose().find()
    monkeypatch.setenv(VARIABLE, "llama.cpp")
    with pytest.raises(ConfigError, match=r"must be xllamacpp or llama-cpp-python.*'llama\.cpp'"):
        provider.choose()


def test_an_unknown_version_is_refused_before_its_structs_are_used(tmp_path: Path) -> None:
    for package, versions in layout.LAYOUTS.items():
        with pytest.raises(MissingBackend, match=rf"0\.0\.1.*{package}=={[*versions][-1]}"):
            layout.check(None, package, "0.0.1")
    file = tmp_path / "libllama.so"
    file.write_text("no library")
    with pytest.raises(MissingBackend, match=r"cannot be loaded.*pip install --force-reinstall"):
        Library(file, "llama-cpp-python", "0.3.36")


def test_a_library_that_exports_nothing_sends_to_llama_cpps_own_server() -> None:
    """As the wheel for Windows, which shows its module's initialiser alone."""
    empty = find_library("m")
    if empty is None:
        pytest.skip("no library of mathematics to take for a wheel")
    with pytest.raises(MissingBackend, match=r"does not export .*llama_backend_init.*more") as why:
        Library(Path(empty), "xllamacpp", [*layout.LAYOUTS["xllamacpp"]][-1])
    for way in ("DFLASH_GGUF_LIBRARY", "--backend torch", "dflash serve --engine llama-server"):
        assert way in str(why.value)


def test_layouts_differ_by_the_field_that_one_build_has_more() -> None:
    sizes = [ctypes.sizeof(kind) for one in layout.LAYOUTS.values() for kind in one.values()]
    assert sizes == [168, 160]


def test_the_library_that_was_chosen_runs_and_only_the_other_layout_is_refused() -> None:
    pytest.importorskip("xllamacpp")
    chosen, lib = provider.choose(), library()
    assert lib.name == f"{chosen.package} {metadata.version(chosen.package)}"
    (other,) = {*layout.LAYOUTS} - {chosen.package}
    handle = ctypes.CDLL(str(lib.path))
    with pytest.raises(MissingBackend, match="not the build known"):
        layout.check(handle, other, [*layout.LAYOUTS[other]][-1])


def test_a_library_without_the_calls_for_states_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    assert not library().lacks()
    monkeypatch.setitem(STAGING, "get_next", ("absent", [], None))
    with pytest.raises(MissingBackend, match=r"does not export .*absent.*--draft ngram run"):
        library().insist_on_states()
