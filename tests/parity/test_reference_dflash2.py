"""DFlash2's own parts against the reference's: convolutions, candidates, walks, distributions.

Whole runs of these cases are in `test_reference.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash.backends.torch.dflash2_session import SelectorRows
from dflash.backends.torch.propose import make_proposer
from dflash.core.types import Request, Sampling
from tests.parity import script
from tests.parity.test_reference import STATES, draft_model

pytestmark = pytest.mark.torch


def given(name: str) -> torch.Tensor:
    return torch.from_numpy(script.parts()[name])


def golden(case: str, name: str) -> torch.Tensor:
    return STATES[f"{case}/parts/{name}"]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def rows_of(case: str) -> SelectorRows:
    model: Any = draft_model(case)
    anchor = torch.tensor([11])
    return SelectorRows(model.candidate_selector, given("hidden")[0], given("logits")[0], anchor)


@pytest.mark.parametrize("case", script.SECOND)
@pytest.mark.parametrize("conv", ["attention_conv", "mlp_conv"])
def test_convolutions_are_the_references(case: str, conv: str) -> None:
    model: Any = draft_model(case)
    for index, layer in enumerate(model.layers):
        before, behind = getattr(layer, conv)(given("x"), 8)
        close(before, golden(case, f"{conv}/{index}/before"))
        close(behind(given("y")), golden(case, f"{conv}/{index}/behind"))


@pytest.mark.parametrize("case", script.SECOND)
def test_the_greedy_walk_is_the_references(case: str) -> None:
    tokens, q = make_proposer(Request([11], 8))(rows_of(case), [11])
    assert q is None
    assert torch.as_tensor(tokens).tolist() == golden(case, "walk/0.0/path")[0].tolist()


@pytest.mark.parametrize("case", script.SECOND)
@pytest.mark.parametrize("temperature", [0.7, 3.0])
def test_along_a_sampled_walk_the_distributions_are_the_references(
    case: str, temperature: float
) -> None:
    path = golden(case, f"walk/{temperature}/path")[0]
    ids, q = (golden(case, f"walk/{temperature}/{name}")[0] for name in ("ids", "q"))
    rows = rows_of(case)
    for place in range(rows.count):
        row = rows.row(place, path[:place], None)[0]
        close((row / temperature).softmax(dim=-1)[ids[place]], q[place])
        assert set(ids[place].tolist()) == set(torch.isfinite(row).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("case", script.SECOND)
def test_what_is_drawn_is_drawn_from_the_distribution_that_is_judged(case: str) -> None:
    sampling = Sampling(temperature=3.0, rule="rejection", seed=5)
    rows = rows_of(case)
    tokens, q = make_proposer(Request([11], 8, sampling=sampling))(rows, [11])
    drawn = torch.as_tensor(tokens)
    assert q is not None
    for place in range(rows.count):
        row = rows.row(place, drawn[:place], None)[0]
        close(q[place], (row / 3.0).softmax(dim=-1))
        assert q[place, drawn[place]] > 0
