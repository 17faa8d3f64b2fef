"""For every test: one thread, no network, none of the user's settings, and hypothesis's profiles.

Those are dev on a desk, ci where CI is set, nightly by HYPOTHESIS_PROFILE. A test keeps the profile
of the moment it is imported, so they are set here, before any is.
"""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before any test module imports an array library, which reads these once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

for name, examples in (("dev", 50), ("ci", 300), ("nightly", 5_000)):
    settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,  # the machine may be busy
        derandomize=name == "ci",
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests, some 700,000 objects, are there to stay: no collection walks them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _nothing_that_stays_is_walked_twice() -> Iterator[None]:
    """Compiled passes hold millions of objects, and the compiler collects after each."""
    yield
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries that count what is left at the end find nothing of ours."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_users_profiles(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tests measure stays with them, and what the user measured does not reach them."""
    place: list[Path] = []

    def folder() -> Path:
        if not place:
            place.append(tmp_path_factory.mktemp("profiles"))
        return place[0]

    monkeypatch.setattr("dflash.profiles.folder", folder)


@pytest.fixture(autouse=True)
def _no_user_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DFLASH_BLOCK_SIZE", "DFLASH_CACHE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _a_log_of_its_own() -> Iterator[None]:
    """What `dflash serve` sets up for its process ends with the test."""
    log = logging.getLogger("dflash.serve")
    level, handlers = log.level, log.handlers[:]
    yield
    log.setLevel(level)
    log.handlers[:] = handlers
