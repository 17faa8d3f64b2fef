from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.backends.torch import dflash_session
from dflash.backends.torch.dflash import DFlashDraftModel
from dflash.backends.torch.dflash_session import DFlashSession
from dflash.backends.torch.rows import Shortlist
from dflash.backends.torch.sampling import greedy, make_picker
from dflash.backends.torch.tables import Tables
from dflash.core.types import Outlook, Plan, Request, Sampling, Verdict
from dflash.errors import WeightsError
from tests.backends.drafts import MIXED, ODDITIES, SLIDING, slow_forward, tiny_draft

pytestmark = pytest.mark.torch

FULL_BLOCK = Plan(rows=7, depth=7)
VOCAB = 512


class Text:
    """A made-up text with made-up target states, and the tables of a made-up target."""

    def __init__(self, model: DFlashDraftModel, size: int = 400) -> None:
        generator = torch.Generator().manual_seed(11)
        width = len(model.spec.taps) * model.spec.target_hidden_size
        self.model = model
        self.ids = torch.randint(0, VOCAB, (size,), generator=generator).tolist()
        self.features = torch.randn(size, width, generator=generator)
        self.embed = torch.randn(VOCAB, 64, generator=generator)
        self.head = torch.randn(VOCAB, 64, generator=generator) / 8

    def open(self, capacity: int = 500, **options: Any) -> DFlashSession:
        tables = Tables(self.embed, lambda hidden: hidden @ self.head.T)
        return DFlashSession(self.model, tables, capacity, **options)

    def start(self, session: DFlashSession, prompt: int, reuse: int = 0, **options: Any) -> None:
        """Begin with the first ``prompt`` tokens; the anchor is the next one."""
        session.begin(Request(self.ids[:prompt], 100, **options), reuse)
        session.commit(self.verdict(reuse, prompt, 1), prompt - reuse)

    def go(self, session: DFlashSession, anchor: int, kept: int) -> None:
        """Commit ``kept`` tokens after the anchor at that position; some rows are left over."""
        session.commit(self.verdict(anchor, anchor + kept + 2, kept + 2), kept)

    def verdict(self, start: int, stop: int, tokens: int) -> Verdict[Tensor]:
        ids = self.ids[stop - tokens + 1 : stop + 1]
        return Verdict(tokens=ids, rows=stop - start, features=self.features[start:stop])

    def uncached(self, anchor: int, rows: int) -> Tensor:
        """Logits [rows - 1, V] of a block at ``anchor``, by the slow forward over everything."""
        ids = [self.ids[anchor], *[self.model.spec.mask_token_id] * (rows - 1)]
        hidden = slow_forward(self.model, self.features[:anchor], self.embed[ids])
        return hidden[1:].float() @ self.head.T


def tokens(session: DFlashSession, plan: Plan = FULL_BLOCK) -> list[int]:
    drafted: list[int] = torch.as_tensor(session.propose(plan).tokens).tolist()
    return drafted


@pytest.mark.parametrize("case", ODDITIES)
def test_cached_proposals_are_those_of_a_forward_over_the_whole_context(case: str) -> None:
    text = Text(tiny_draft(**ODDITIES[case]))
    session = text.open()
    text.start(session, 5)
    anchor = 5
    for kept in (1, 8, 3, 2, 8, 8, 1):
        assert tokens(session) == text.uncached(anchor, 8).argmax(-1).tolist()
        text.go(session, anchor, kept)
        anchor += kept


def test_the_edge_of_a_bidirectional_window_is_exact_at_every_length() -> None:
    """Short of the window no mask is made: the first place where one is needed must have it."""
    text = Text(tiny_draft(**SLIDING, is_causal=False))
    session = text.open()
    text.start(session, 1)
    for anchor in range(1, 12):
        for rows in (1, 3, 7):
            drafted = tokens(session, Plan(rows=rows, depth=rows))
            assert drafted == text.uncached(anchor, rows + 1).argmax(-1).tolist()
        text.go(session, anchor, 1)


def test_rounds_that_draft_nothing_are_caught_up_later() -> None:
    text = Text(tiny_draft(**MIXED))
    session = text.open()
    text.start(session, 5)
    for anchor in range(5, 40):
        text.go(session, anchor, 1)
    assert session.outlook() == Outlook(most=7, lag=40, tree=64)
    assert tokens(session) == text.uncached(40, 8).argmax(-1).tolist()
    assert session.outlook().lag == 0


def test_a_shorter_block_is_drafted_as_one() -> None:
    text = Text(tiny_draft())
    session = text.open()
    text.start(session, 9)
    for rows in (1, 3, 7):
        proposal = session.propose(Plan(rows=rows, depth=rows))
        assert proposal.rows == rows
        wanted = text.uncached(9, rows + 1).argmax(-1).tolist()
        assert torch.as_tensor(proposal.tokens).tolist() == wanted


def test_more_rows_than_the_block_has_are_not_proposed() -> None:
    text = Text(tiny_draft())
    session = text.open()
    text.start(session, 9)
    assert session.propose(Plan(rows=50, depth=50)).rows == 7
    assert session.propose(Plan(rows=0)).rows == 0


def test_nothing_is_proposed_before_there_is_an_anchor() -> None:
    text = Text(tiny_draft())
    session = text.open()
    assert session.outlook().most == 0
    session.begin(Request(text.ids[:20], 10), 0)
    session.commit(Verdict(tokens=[], rows=12, features=text.features[:12]), 12)
    assert session.outlook() == Outlook(most=0, lag=12, tree=64)
    session.commit(text.verdict(12, 20, 1), 8)
    assert session.outlook() == Outlook(most=7, lag=20, tree=64)


def test_a_commit_only_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(tiny_draft())
    session = text.open()
    monkeypatch.setattr(text.model, "fuse", lambda _: pytest.fail("worked in commit"))
    text.start(session, 30)
    assert session.outlook().lag == 30


def test_the_queue_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dflash_session, "QUEUE_BYTES", 20 * 128 * 4)
    text = Text(tiny_draft())
    session = text.open()
    text.start(session, 15)
    assert session.outlook().lag == 15
    text.go(session, 15, 8)
    assert session.outlook().lag == 0
    assert tokens(session) == text.uncached(23, 8).argmax(-1).tolist()


def test_a_context_row_is_projected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dflash_session, "CHUNK", 16)
    text = Text(tiny_draft())
    session = text.open()
    seen: list[int] = []
    fuse = text.model.fuse

    def counted(features: Tensor) -> Tensor:
        seen.append(features.shape[1])
        return fuse(features)

    monkeypatch.setattr(text.model, "fuse", counted)
    text.start(session, 40)
    tokens(session)
    tokens(session)
    text.go(session, 40, 3)
    tokens(session)
    assert seen == [16, 16, 8, 3]


@pytest.mark.parametrize("name", ["item", "tolist", "cpu", "numpy", "__bool__", "__int__"])
def test_a_proposal_never_reads_from_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(tiny_draft(**MIXED))
    session = text.open()
    text.start(session, 30)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, name, lambda *_: pytest.fail(f"propose called {name}"))
        proposal = session.propose(FULL_BLOCK)
    assert torch.as_tensor(proposal.tokens).tolist() == text.uncached(30, 8).argmax(-1).tolist()


def poison(session: DFlashSession) -> None:
    """NaN into every cache row that holds no context."""
    for cache in session._caches:
        cache.rows[:, :, :, cache.count :] = torch.nan


@pytest.mark.parametrize("options", [{}, {"window": 12}])
@pytest.mark.parametrize("shape", [{}, MIXED])
def test_unused_cache_rows_are_never_read(shape: dict[str, Any], options: dict[str, Any]) -> None:
    text = Text(tiny_draft(**shape))
    clean, poisoned = text.open(**options), text.open(**options)
    anchor = 30
    for session in (clean, poisoned):
        text.start(session, anchor)
    for kept in (1, 8, 3, 8):
        poison(poisoned)
        assert tokens(poisoned) == tokens(clean)
        poison(poisoned)
        for session in (clean, poisoned):
            text.go(session, anchor, kept)
        anchor += kept


@pytest.mark.parametrize(("shape", "fresh"), [({}, 4), (MIXED, 9)])
def test_a_second_request_that_shares_a_prefix_drafts_like_a_cold_one(
    shape: dict[str, Any], fresh: int
) -> None:
    """A sliding layer does so as soon as its window (8) is full of new rows."""
    text = Text(tiny_draft(**shape))
    warm, cold = text.open(), text.open()
    text.start(warm, 60)
    tokens(warm)
    text.go(warm, 60, 5)
    other = [*text.ids[:50], *range(fresh)]
    features = torch.cat((text.features[:50], text.features[100 : 100 + fresh]))
    assert warm.holds(other, len(other) - 1) == 50
    for session, reuse in ((warm, 50), (cold, 0)):
        session.begin(Request(other, 10), reuse)
        poison(session)
        verdict = Verdict(tokens=[9], rows=len(other) - reuse, features=features[reuse:])
        session.commit(verdict, verdict.rows)
    assert tokens(warm) == tokens(cold)


def test_holds_counts_queued_rows_and_stops_at_the_first_difference() -> None:
    text = Text(tiny_draft())
    session = text.open()
    assert session.holds(text.ids[:10], 9) == 0
    text.start(session, 20)
    assert session.holds(text.ids[:40], 39) == 20
    assert session.holds(text.ids[:40], 7) == 7
    assert session.holds(text.ids[:5], 4) == 4
    assert session.holds([*text.ids[:6], 511, 2, 3], 8) == 6


@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("reuse", [0, 3, 19])
def test_a_request_may_resume_at_any_row_held(absorbed: bool, reuse: int) -> None:
    text = Text(tiny_draft())
    session = text.open()
    text.start(session, 20)
    if absorbed:
        tokens(session)
    text.start(session, 25, reuse)
    assert tokens(session) == text.uncached(25, 8).argmax(-1).tolist()


def test_a_fork_and_its_origin_go_separate_ways() -> None:
    text = Text(tiny_draft(**MIXED))
    session = text.open()
    text.start(session, 20)
    tokens(session)
    text.go(session, 20, 2)
    twin = session.fork()
    text.go(session, 22, 8)
    tokens(session)
    assert tokens(twin) == text.uncached(22, 8).argmax(-1).tolist()
    text.go(twin, 22, 3)
    assert tokens(twin) == text.uncached(25, 8).argmax(-1).tolist()
    assert tokens(session) == text.uncached(30, 8).argmax(-1).tolist()


def test_a_closed_session_holds_nothing_and_closes_twice() -> None:
    text = Text(tiny_draft())
    session = text.open()
    text.start(session, 20)
    tokens(session)
    session.close()
    session.close()
    assert session.bytes() == 0
    assert session.holds(text.ids[:20], 19) == 0


def windowed_reference(text: Text, anchor: int, window: int, rows: int = 7) -> list[int]:
    """What a draft says that sees only the last ``window`` rows, at their true positions."""
    model, mask = text.model, text.model.spec.mask_token_id
    context = torch.arange(anchor - min(window, anchor), anchor)
    block = torch.arange(anchor, anchor + rows + 1)
    held = model.context_kv(model.fuse(text.features[context])[None], context)
    noise = text.embed[[text.ids[anchor], *[mask] * rows]]
    hidden = model.block(noise[None], block, held)[0, 1:]
    drafted: list[int] = (hidden @ text.head.T).argmax(-1).tolist()
    return drafted


@pytest.mark.parametrize("rows", [7, 2])
def test_a_window_bounds_the_history_and_keeps_positions(rows: int) -> None:
    text = Text(tiny_draft())
    session = text.open(window=12)
    text.start(session, 30)
    anchor = 30
    for kept in (1, 8, 3, 8, 8, 2, 5, 8, 8, 8):
        drafted = tokens(session, Plan(rows=rows, depth=rows))
        assert drafted == windowed_reference(text, anchor, 12, rows)
        text.go(session, anchor, kept)
        anchor += kept


def test_a_short_text_in_a_wide_window_is_seen_whole() -> None:
    text = Text(tiny_draft())
    session = text.open(window=300)
    text.start(session, 30)
    assert tokens(session) == text.uncached(30, 8).argmax(-1).tolist()


@pytest.mark.parametrize("prompt", [5, 1500])
def test_after_2000_tokens_a_window_of_32_holds_at_most_window_and_block(prompt: int) -> None:
    text = Text(tiny_draft(), size=2100)
    session = text.open(capacity=2100, window=32)
    text.start(session, prompt)
    for anchor in range(prompt, 2000, 5):
        tokens(session)
        text.go(session, anchor, 5)
    spec = text.model.spec
    entries = session.bytes() // (2 * spec.num_kv_heads * spec.head_dim * 4 * spec.num_layers)
    assert entries <= 32 + spec.block_size


def test_sliding_layers_keep_no_more_than_they_see() -> None:
    mixed, sliding = Text(tiny_draft(**MIXED)), Text(tiny_draft(**SLIDING))
    row = 2 * 2 * 16 * 4  # keys and values, heads, width, bytes
    assert mixed.open(1000).bytes() == row * ((1000 + 8) + (7 + 8))
    assert sliding.open(1000).bytes() == row * 2 * (7 + 8)


def test_a_windowed_session_resumes_anywhere_with_the_history_it_has_left() -> None:
    text = Text(tiny_draft())
    session = text.open(window=20)
    for place, left in ((95, 15), (50, 0), (0, 0)):
        text.start(session, 100)
        tokens(session)
        poison(session)
        assert session.holds(text.ids[:120], place) == place
        text.start(session, place + 3, place)
        assert tokens(session) == windowed_reference(text, place + 3, left + 3)


@pytest.mark.parametrize("options", [{}, {"top_k": 20, "top_p": 0.9}])
def test_sampled_drafts_add_the_noise_of_the_places_they_are_for(options: dict[str, Any]) -> None:
    text = Text(tiny_draft())
    session = text.open()
    sampling = Sampling(temperature=0.8, seed=42, sample=3, **options)
    text.start(session, 9, sampling=sampling)
    text.go(session, 9, 4)
    pick = make_picker(sampling)
    wanted = pick(text.uncached(13, 8), 5)  # the first token of the output was the anchor at 9
    assert tokens(session) == wanted.tolist()
    assert tokens(session) != text.uncached(13, 8).argmax(-1).tolist()


def test_embedding_rows_are_scaled_and_the_mask_row_may_be_replaced() -> None:
    text = Text(tiny_draft())
    row = torch.randn(64, generator=torch.Generator().manual_seed(5))
    tables = Tables(text.embed, lambda hidden: hidden @ text.head.T, scale=2.0, mask_row=row)
    session = DFlashSession(text.model, tables, 100)
    text.start(session, 9)
    noise = torch.stack([text.embed[text.ids[9]], *[row] * 7]) * 2.0
    hidden = slow_forward(text.model, text.features[:9], noise)[1:].float()
    assert tokens(session) == (hidden @ text.head.T).argmax(-1).tolist()


def test_a_reduced_head_proposes_target_ids() -> None:
    text = Text(tiny_draft())
    ids = torch.tensor([5, 9, 100, 101, 400, 511])
    tables = Tables(text.embed, lambda hidden: hidden @ text.head[ids].T, target_ids=ids)
    session = DFlashSession(text.model, tables, 100)
    for sampling in (Sampling(), Sampling(temperature=0.7, seed=1)):
        text.start(session, 9, sampling=sampling)
        logits = text.uncached(9, 8)
        allowed = torch.full_like(logits, -torch.inf)
        allowed[:, ids] = logits[:, ids]
        assert tokens(session) == make_picker(sampling)(allowed, 1).tolist()


@pytest.mark.parametrize("rising", [True, False])
def test_a_reduced_head_in_order_is_not_widened_for_its_likeliest_tokens(
    rising: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, widened, whole = Text(tiny_draft()), list[int](), Shortlist.whole
    ids = torch.tensor([5, 9, 100, 101, 400, 511] if rising else [511, 9, 100, 5, 400, 101])
    plain = Tables(text.embed, lambda hidden: hidden @ text.head[ids].T, target_ids=ids)
    session, other = (
        DFlashSession(text.model, tables, 100) for tables in (replace(plain, rising=rising), plain)
    )

    def counted(rows: Shortlist) -> Tensor:
        widened.append(1)
        return whole(rows)

    monkeypatch.setattr(Shortlist, "whole", counted)
    options = (Sampling(presence_penalty=1), Sampling(draft_p_min=0.3), Sampling(temperature=0.8))
    for sampling in (Sampling(), Sampling(temperature=0.8, greedy_drafts=True), *options):
        text.start(session, 9, sampling=sampling)
        widened.clear()
        said = tokens(session)
        assert bool(widened) == (sampling in options or not rising)
        text.start(other, 9, sampling=sampling)
        assert said == tokens(other)


def test_equal_logits_of_a_reduced_head_say_the_lowest_id() -> None:
    rows = Shortlist(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]]), torch.tensor([4, 7, 9]), 12)
    assert rows.largest().tolist() == greedy(rows.whole()).tolist() == [7, 4]


def test_a_draft_that_computes_nan_is_named_and_not_silently_useless() -> None:
    text = Text(tiny_draft())
    session = text.open()
    text.features[3] = torch.nan
    text.start(session, 9)
    drafted = tokens(session)
    assert all(0 <= token < VOCAB for token in drafted)
    with pytest.raises(WeightsError, match=r"not finite.*bfloat16 or float32"):
        text.go(session, 9, 1)


def test_whether_values_are_finite_is_computed_where_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, asked, isfinite = Text(tiny_draft()), list[int](), Tensor.isfinite
    session = text.open()
    text.start(session, 9)

    def counted(x: Tensor) -> Tensor:
        asked.append(number)
        return isfinite(x)

    for number in range(1, 10):
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "isfinite", counted)
            tokens(session)
        text.go(session, 8 + number, 1)
    assert asked == [1, 2, 4, 8]


def test_features_of_another_dtype_are_cast() -> None:
    text = Text(tiny_draft().to(torch.bfloat16))
    text.embed = text.embed.half()
    head = text.head.half()
    tables = Tables(text.embed, lambda hidden: hidden.half() @ head.T)
    session = DFlashSession(text.model, tables, 100)
    text.features = text.features.half()
    text.start(session, 9)
    assert session.propose(FULL_BLOCK).rows == 7


def test_one_session_serves_prompts_of_every_length_in_turn() -> None:
    text = Text(tiny_draft(**MIXED))
    session = text.open()
    for prompt in (40, 5, 40, 1):
        text.start(session, prompt)
        assert tokens(session) == text.uncached(prompt, 8).argmax(-1).tolist()
        text.go(session, prompt, 3)
        assert tokens(session) == text.uncached(prompt + 3, 8).argmax(-1).tolist()


def test_a_gap_in_the_bookkeeping_is_an_assertion_not_a_bad_draft() -> None:
    text = Text(tiny_draft())
    session = text.open()
    with pytest.raises(AssertionError, match="rows asked for"):
        session.begin(Request(text.ids[:20], 10), 5)
    text.start(session, 9)
    with pytest.raises(AssertionError, match="no features"):
        session.commit(Verdict(tokens=[1]), 1)


def widths(session: DFlashSession) -> Sequence[int]:
    return [cache.seen for cache in session._caches]


def test_each_layer_sees_what_its_kind_and_the_window_allow() -> None:
    text = Text(tiny_draft(**MIXED))
    session = text.open(window=5)
    text.start(session, 30)
    tokens(session)
    assert widths(session) == [5, 5]
    session = text.open(window=20)
    text.start(session, 30)
    tokens(session)
    assert widths(session) == [7, 20]
