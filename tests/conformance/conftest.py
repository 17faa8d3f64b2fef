"""Pairs every backend with every entry point it has; one target per backend and session."""

from dataclasses import replace
from functools import cache

import pytest

from tests.conformance.backends import MAKERS, Backend
from tests.conformance.entries import ENTRIES, Entry

ENTRY_LISTS = {
    "entry": ENTRIES,
    "entry_with_strings": [entry for entry in ENTRIES if entry.strings],
    "engine_entry": [entry for entry in ENTRIES if entry.any_block],
    "entry_with_options": [entry for entry in ENTRIES if entry.options],
}

SHALLOW = {
    "gguf": (
        "dflash.Engine.stream",
        "dflash.llama.Llama.create_completion",
        "dflash.llama.Llama.create_chat_completion",
    ),
    "mlx": ("dflash.Engine.generate", "dflash.model_mlx.stream_generate"),
    "torch-compiled": ("dflash.Engine.generate",),
    "torch-graphs": ("dflash.Engine.generate",),
    "torch-int8": ("dflash.Engine.generate",),
    "torch": (
        "dflash.Engine.generate",
        "dflash.Engine.stream",
        "dflash generate",
        "dflash.speculative.SpeculativeDecoder.stream",
        "dflash.model.dflash_generate",
        "dflash.DFlashDraftModel.spec_generate",
    ),
}
"""Backends that a few entries stand for: the others are the same code above the same sessions."""
SHALLOW_SKIPS = ("test_engine_use", "test_ngram", "test_characters", "test_options")


def _goes_through(backend: str, entry: Entry) -> bool:
    return backend not in SHALLOW or entry.name in SHALLOW[backend]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``backend`` or ``tied`` alone: every backend; with an entry: every pair there is."""
    fixtures = ("backend", "tied", "branching")
    place = next((name for name in fixtures if name in metafunc.fixturenames), None)
    if place is None:
        return
    names = sorted(MAKERS) if place != "branching" else ["torch", "toy"]
    if metafunc.module.__name__.endswith(SHALLOW_SKIPS):
        names = [name for name in names if name != "mlx"]
    entries = next((name for name in ENTRY_LISTS if name in metafunc.fixturenames), None)
    if entries is None:
        names = [name for name in names if name != "torch-int8"]  # the sessions are torch's
        if not metafunc.module.__name__.endswith("test_sessions"):
            names = [name for name in names if name not in ("torch-graphs", "torch-compiled")]
        metafunc.parametrize(place, names, indirect=True, scope="session")
        return
    pairs = [
        pytest.param(backend, entry, id=f"{backend}-{entry.name}")
        for backend in names
        for entry in ENTRY_LISTS[entries]
        if entry.exists_on(backend) and _goes_through(backend, entry)
    ]
    metafunc.parametrize((place, entries), pairs, indirect=[place], scope="session")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Backend]:
    """Backends opened so far, by name and whether their rows have twins."""
    return {}


def _backend(request: pytest.FixtureRequest, ties: bool) -> Backend:
    made: dict[tuple[str, bool], Backend] = request.getfixturevalue("made")
    key = (request.param, ties)
    if key not in made:
        folders = request.getfixturevalue("tmp_path_factory")
        found = MAKERS[request.param](folders.mktemp(request.param), ties)
        made[key] = replace(found, own=cache(found.own))  # one pair, used again as any other is
    return made[key]


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    """A backend under test."""
    return _backend(request, False)


@pytest.fixture(scope="session")
def tied(request: pytest.FixtureRequest) -> Backend:
    """A backend whose even ids each have a twin with exactly equal logits, the next odd id."""
    return _backend(request, True)


@pytest.fixture(scope="session")
def branching(request: pytest.FixtureRequest) -> Backend:
    """A backend that judges trees."""
    return _backend(request, False)
