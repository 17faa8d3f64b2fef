"""The table of known faults is true: every test it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflash.config import LoadConfig, from_options
from dflash.errors import ConfigError
from tests.backends.families import FAMILIES
from tests.faults import COVERED

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "targets-and-drafts.md"


@pytest.mark.parametrize("fault", COVERED)
def test_every_fault_is_covered_by_tests_that_exist(fault: str) -> None:
    for name in COVERED[fault]:
        file, _, test = name.partition("::")
        source = (HERE / file).read_text(encoding="utf-8")
        assert f"def {test}(" in source, f"{fault}: {name} does not exist"


def test_a_quantised_cache_cannot_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="unknown option 'kv_cache_dtype'"):
        from_options(LoadConfig, {"target": "toy", "kv_cache_dtype": "fp8"})


def test_the_page_of_targets_names_the_families_that_are_tested() -> None:
    targets = PAGE.read_text(encoding="utf-8").split("## Drafts")[0]
    assert sorted(re.findall(r"\(?`([a-z0-9_]+)`", targets.split("The families")[0])) == FAMILIES
