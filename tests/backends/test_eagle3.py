"""EAGLE-3 drafts beside a target: loading, chains, and a state that follows every commit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.backends.torch.draft_load import LoadedDraft, load_draft
from dflash.backends.torch.load import wrap_target
from dflash.core.types import Plan, Request, Sampling, Verdict
from dflash.errors import PairError, WeightsError

from .eagle_drafts import KEPT, save_eagle
from .tiny import HIDDEN, VOCAB, tiny_target

CHAIN = Plan(rows=5, depth=5)
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 8, "use_sliding_window": True}


def load(folder: Path, target: Any = None, **options: Any) -> LoadedDraft:
    return load_draft(str(folder), wrap_target(target or tiny_target()), **options)


def features(count: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(count, 3 * HIDDEN, generator=torch.Generator().manual_seed(seed))


def text(count: int) -> list[int]:
    rng = random.Random(1)
    return [rng.randrange(VOCAB) for _ in range(count)]


def told(session: Any, tokens: list[int], rows: torch.Tensor, start: int) -> None:
    """Commit everything known from position ``start`` on; the last token is the anchor."""
    count = len(tokens) - 1 - start
    session.commit(Verdict(tokens[start + 1 :], rows=count, features=rows[start:][:count]), count)


def proposed(session: Any) -> list[int]:
    return torch.as_tensor(session.propose(CHAIN).tokens).tolist()


def fresh(draft: LoadedDraft, tokens: list[int], rows: torch.Tensor, **options: Any) -> Any:
    session = draft.open(64)
    session.begin(Request(tokens[:1], 99, **options), 0)
    told(session, tokens, rows, 0)
    return session


def test_both_names_of_the_layer_load_the_same_draft(tmp_path: Path) -> None:
    one, other = (load(save_eagle(tmp_path / p, prefix=p)) for p in ("midlayer.", "layers.0."))
    assert proposed(fresh(one, text(9), features(9))) == proposed(
        fresh(other, text(9), features(9))
    )
    assert all(
        token < 2 * KEPT and token % 2 == 0 for token in proposed(fresh(one, text(9), features(9)))
    )


@pytest.mark.parametrize("changes", [{}, SLIDING, {"norm_before_residual": True}], ids=str)
def test_any_commits_in_any_number_lead_to_what_a_fresh_session_says(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    draft = load(save_eagle(tmp_path, **changes))
    rng, tokens, rows = random.Random(3), text(50), features(50)
    session = draft.open(64)
    session.begin(Request(tokens[:4], 99), 0)
    session.commit(Verdict([], rows=3, features=rows[:3]), 3)  # a chunk of the prompt
    session.commit(Verdict(tokens[4:5], rows=1, features=rows[3:4]), 1)
    known = 5
    while known < 44:
        if rng.random() < 0.7:  # else a plain step: told, not asked
            assert proposed(session) == proposed(fresh(draft, tokens[:known], rows))
        more = rng.randint(1, 4)
        told(session, tokens[: known + more], rows, known - 1)
        known += more


def test_a_resumed_session_says_what_a_fresh_one_says(tmp_path: Path) -> None:
    draft = load(save_eagle(tmp_path))
    tokens, rows = text(30), features(30)
    for cut in (1, 7, 12, 19):
        session = fresh(draft, tokens[:20], rows)
        proposed(session)
        other = [*tokens[:cut], (tokens[cut] + 1) % VOCAB, *tokens[cut + 1 : 25]]
        reuse = session.holds(other, len(other) - 1)
        assert reuse == cut - 1  # the row before the changed token has read it
        session.begin(Request(other[:-1], 9), reuse)
        more = rows[reuse : len(other) - 1]
        session.commit(Verdict(other[-1:], rows=len(more), features=more), len(more))
        assert proposed(session) == proposed(fresh(draft, other, rows))


def test_the_same_prompt_keeps_every_row(tmp_path: Path) -> None:
    tokens, rows = text(20), features(20)
    session = fresh(load(save_eagle(tmp_path)), tokens, rows)
    first = proposed(session)
    assert session.holds(tokens, 19) == 19
    twin = fresh(load(save_eagle(tmp_path)), tokens, rows).fork()
    assert type(twin) is type(session) and proposed(twin) == first


def test_a_queue_too_long_to_keep_is_absorbed_but_for_its_newest_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, tokens, rows = load(save_eagle(tmp_path)), text(20), features(20)
    expected = proposed(fresh(draft, tokens, rows))
    monkeypatch.setattr("dflash.backends.torch.dflash_session.QUEUE_BYTES", 0)
    session = fresh(draft, tokens, rows)
    assert session.outlook().lag == 1
    assert proposed(session) == expected


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_a_sampled_chain_says_what_it_was_drawn_from(tmp_path: Path, rule: Any) -> None:
    session = fresh(
        load(save_eagle(tmp_path)), text(9), features(9), sampling=Sampling(0.9, seed=4, rule=rule)
    )
    proposal = session.propose(CHAIN)
    if rule == "match":
        assert proposal.q is None
        return
    q = proposal.q
    assert q is not None and q.shape == (5, VOCAB)
    torch.testing.assert_close(q.sum(dim=-1), torch.ones(5, dtype=q.dtype))
    assert (q[:, 1::2] == 0).all() and (q.gather(1, proposal.tokens[:, None]) > 0).all()


def test_a_head_that_does_not_match_its_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="d2t has 200 entries, draft_vocab_size is 128"):
        load(save_eagle(tmp_path, draft_vocab_size=128))


def test_a_draft_of_another_width_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(PairError, match="width 32, the target's are 64"):
        load(save_eagle(tmp_path, target_hidden_size=32))
