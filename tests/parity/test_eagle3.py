"""EAGLE-3 against golden files of speculators' own model (see README.md beside this)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from dflash.backends.torch.eagle3 import Eagle3DraftModel
from dflash.backends.torch.eagle3_session import Chain, Eagle3Session
from dflash.backends.torch.tables import Tables
from dflash.core.types import Request, Verdict
from dflash.drafts.spec import read_spec
from tests.parity import script_eagle3 as script

pytestmark = pytest.mark.torch

GOLDEN = load_file(Path(__file__).parent / "golden" / "eagle3.safetensors")


def open_session(case: str) -> Eagle3Session:
    model = Eagle3DraftModel(read_spec(script.config(case))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            made = script.weight(case, name, tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(made))
    rows = GOLDEN[case].shape[-1]
    reduced = rows < model.spec.vocab_size
    width = model.spec.hidden_size
    embed, head = (
        torch.from_numpy(script.weight(case, name, (count, width)))
        for name, count in (
            ("embed_tokens.weight", model.spec.vocab_size),
            ("lm_head.weight", rows),
        )
    )
    ids = torch.arange(rows) + torch.from_numpy(script.deltas()) if reduced else None
    tables = Tables(embed, lambda hidden: F.linear(hidden, head), target_ids=ids)
    return Eagle3Session(model.requires_grad_(False), tables, script.ROWS + script.STEPS)


@pytest.mark.parametrize("case", script.CASES)
def test_chains_behind_every_row_are_those_of_speculators(case: str) -> None:
    session, text = open_session(case), script.tokens()
    features, ids = torch.from_numpy(script.features()), session._tables.target_ids
    session.begin(Request(text[:1], 99), 0)
    for row, part in enumerate(features.split(1)):  # one committed token a round
        session.commit(Verdict(text[row + 1 : row + 2], rows=1, features=part), 1)
        with torch.inference_mode():
            chain = Chain(session, script.STEPS, *session._catch_up(), row + 1)
            for step in range(script.STEPS):
                found = chain.row(step, text[row + 2 : row + 2 + step], None)[0]
                found = found if ids is None else found[ids]
                if row + step + 1 < script.ROWS:  # speculators pads the text with zeros
                    torch.testing.assert_close(found, GOLDEN[case][step, row], rtol=1e-5, atol=1e-5)
            for cache in session._caches:
                cache.crop(row + 1)


def test_a_reduced_vocabulary_says_nothing_of_other_tokens() -> None:
    session = open_session("llama")
    with torch.inference_mode():
        said = session.logits(torch.zeros(1, session._model.spec.hidden_size))
    kept = torch.zeros(session._model.spec.vocab_size, dtype=torch.bool)
    kept[session._tables.target_ids] = True
    assert said[0, kept].isfinite().all() and (said[0, ~kept] == -torch.inf).all()
