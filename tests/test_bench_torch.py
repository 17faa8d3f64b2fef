"""The measurements on a small random target: transformers' arm, and the judge of ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bench import identical  # noqa: E402 - after the check for torch
from bench.arms import plain_transformers, transformers_arm  # noqa: E402
from tests.backends.tiny import (  # noqa: E402
    reference_generate,
    save_target,
    tiny_target,
    tiny_tokenizer,
)

pytestmark = pytest.mark.torch

PROMPT = [5, 77, 130, 9, 42]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tiny_target(), tiny_tokenizer(), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return plain_transformers(str(folder))


def test_the_transformers_arm_gives_the_greedy_ids_and_both_times(model: Any) -> None:
    run = transformers_arm(model, frozenset({0}))(PROMPT, 12)
    assert list(run.ids) == reference_generate(model, PROMPT, 12, eos={0})
    assert run.first == 1
    assert run.prefill > 0 and run.decode > 0
    assert run.rate == pytest.approx((len(run.ids) - 1) / run.decode)


def test_the_gap_is_the_distance_of_two_one_row_logits(folder: Path, model: Any) -> None:
    with torch.inference_mode():
        row = model(torch.tensor([PROMPT])).logits[0, -1]
    got = identical.one_row_gap(str(folder))(PROMPT, 3, 8)
    assert got == pytest.approx(abs(float(row[3] - row[8])), abs=1e-5)
