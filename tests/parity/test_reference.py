"""The draft against golden files of the reference implementation (see README.md beside this)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from dflash.backends.torch.dflash import DFlashDraftModel
from dflash.backends.torch.dflash_session import DFlashSession
from dflash.backends.torch.kinds import KINDS
from dflash.backends.torch.tables import Tables
from dflash.core.types import Plan, Request, Verdict
from dflash.drafts.spec import read_spec
from tests.parity import script

pytestmark = pytest.mark.torch

GOLDEN = Path(__file__).parent / "golden"
RUNS: dict[str, Any] = json.loads((GOLDEN / "runs.json").read_text(encoding="utf-8"))["runs"]
STATES = load_file(GOLDEN / "states.safetensors")


def draft_model(case: str) -> DFlashDraftModel:
    spec = read_spec(script.config(case))
    model: DFlashDraftModel = KINDS.load(spec.kind).module(spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(script.weight(case, name, tuple(parameter.shape))))
    return model.eval().requires_grad_(False)


def features(model: DFlashDraftModel, start: int, stop: int) -> torch.Tensor:
    taps = [torch.from_numpy(script.states(layer, stop)[start:]) for layer in model.spec.taps]
    return torch.cat(taps, dim=-1)


def open_session(model: DFlashDraftModel, capacity: int) -> DFlashSession:
    embed, head = (torch.from_numpy(table) for table in script.tables())
    scale = model.spec.embedding_scale_for(None)
    tables = Tables(embed, lambda h: F.linear(h, head), scale)
    made: DFlashSession = KINDS.load(model.spec.kind).session(model, tables, capacity)
    return made


def play(model: DFlashDraftModel, length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Rounds of one scripted run, as (committed, drafted); the first is the prompt's token."""
    prompt, left = script.prompt(length), script.max_tokens(length)
    session = open_session(model, length + left)
    session.begin(Request(prompt, left), 0)
    verdict = Verdict(tokens=[5], rows=length, features=features(model, 0, length))
    session.commit(verdict, length)
    position, left, round_ = length, left - 1, 0
    yield [5], []
    while left:
        rows = min(model.spec.block_size - 1, left)  # the reference drafts up to the very end
        proposal = session.propose(Plan(rows=rows, depth=rows))
        drafted = torch.as_tensor(proposal.tokens).tolist()
        own, accepted = script.answer(drafted, round_)
        kept = min(accepted + 1, left)
        rows_kept = features(model, position, position + accepted + 1)
        session.commit(Verdict(tokens=own[: accepted + 1], features=rows_kept), kept)
        position, left, round_ = position + kept, left - kept, round_ + 1
        yield own[:kept], drafted


@pytest.mark.parametrize("case", script.CASES)
@pytest.mark.parametrize("prompt", script.PROMPTS)
def test_whole_greedy_runs_draft_and_end_like_the_reference(case: str, prompt: str) -> None:
    length = script.PROMPTS[prompt]
    told = RUNS[f"{case}/{prompt}"]
    model = draft_model(case)
    states: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda _m, _i, out: states.append(out[0]))
    rounds = list(play(model, length))
    assert [drafted for _, drafted in rounds[1:]] == told["drafted"]
    ids = script.prompt(length) + [token for tokens, _ in rounds for token in tokens]
    assert ids == told["ids"]
    golden = {key: value for key, value in STATES.items() if key.startswith(f"{case}/{prompt}/")}
    assert golden
    for key, value in golden.items():
        torch.testing.assert_close(states[int(key.rsplit("/", 1)[1])], value, rtol=0, atol=1e-5)


def test_the_script_accepts_none_one_some_and_all() -> None:
    assert {0, 1, 3, 7} <= set(script.ACCEPTS)
    drafted = [4, 5, 6]
    for round_, accepts in enumerate(script.ACCEPTS):
        own, accepted = script.answer(drafted, round_)
        assert accepted == min(accepts, 3)
        assert own[:accepted] == drafted[:accepted]
        assert accepted == 3 or own[accepted] != drafted[accepted]
