"""DFlash2 sessions: what v1 sessions promise, tokens in turn, options, and the ways to choose."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.backends.torch.dflash2 import DFlash2DraftModel
from dflash.backends.torch.dflash2_session import DFlash2Session
from dflash.backends.torch.dflash_session import DFlashSession
from dflash.backends.torch.propose import make_proposer
from dflash.backends.torch.rows import whole
from dflash.backends.torch.tables import States, Tables
from dflash.backends.torch.target import TorchTargetSession
from dflash.core.decode import decode
from dflash.core.policy import Fixed
from dflash.core.types import Plan, Request, Sampling
from dflash.verify.sampling import DEPTH, audit
from tests.backends.drafts import tiny_draft, tiny_draft2
from tests.backends.test_dflash_session import Text, tokens
from tests.backends.test_sampled_sessions import PROMPT, SAMPLES, exact, models, tables
from tests.backends.tiny import reference_generate

pytestmark = pytest.mark.torch

VOCAB = 512


class Text2(Text):
    """The made-up text under a DFlash2 draft."""

    def open(self, capacity: int = 500, **options: Any) -> DFlash2Session:
        given = Tables(self.embed, lambda hidden: hidden @ self.head.T)
        assert isinstance(self.model, DFlash2DraftModel)
        return DFlash2Session(self.model, given, capacity, **options)

    def uncached(self, anchor: int, rows: int) -> Tensor:
        """States [rows - 1, H] of a block, all context at once and without a cache."""
        ids = [self.ids[anchor], *[self.model.spec.mask_token_id] * (rows - 1)]
        context = self.model.context_kv(
            self.model.fuse(self.features[None, :anchor]), torch.arange(anchor)
        )
        where = anchor + torch.arange(rows)
        return self.model.block(self.embed[ids][None], where, context)[0, 1:]


def walked(text: Text2, anchor: int, rows: int) -> list[int]:
    """The greedy walk, written a second time."""
    model = text.model
    assert isinstance(model, DFlash2DraftModel)
    selector, hidden = model.candidate_selector, text.uncached(anchor, rows)
    before, path = text.ids[anchor], []
    for state in hidden:
        logits = state @ text.head.T
        best = logits.argsort(descending=True)[: selector.top_k]
        gate = selector.hidden_projection.weight @ state
        left = selector.predecessor_codebook[before] * gate
        scores = {int(i): float(logits[i] + left @ selector.successor_codebook[i]) for i in best}
        before = max(scores, key=lambda i: scores[i])
        path.append(before)
    return path


def opened(**changes: Any) -> tuple[Text2, DFlash2Session]:
    text = Text2(tiny_draft2(**changes))
    session = text.open()
    text.start(session, 5)
    return text, session


def test_cached_walks_are_those_of_a_forward_over_the_whole_context() -> None:
    text, session = opened()
    anchor = 5
    for kept in (1, 8, 3, 2, 8, 1):
        assert tokens(session) == walked(text, anchor, 8)
        text.go(session, anchor, kept)
        anchor += kept


def test_a_short_block_is_drafted_at_its_own_length() -> None:
    text, session = opened()
    for rows in (1, 2, 5):
        assert tokens(session, Plan(rows=rows, depth=rows)) == walked(text, 5, rows + 1)


def test_the_selector_changes_what_is_drafted() -> None:
    """Or the tests above would pass without one."""
    text, session = opened()
    assert tokens(session) != (text.uncached(5, 8) @ text.head.T).argmax(-1).tolist()


def test_a_fork_goes_its_own_way_with_a_session_of_its_kind() -> None:
    text, session = opened()
    twin = session.fork()
    assert type(twin) is DFlash2Session
    text.go(session, 5, 3)
    assert tokens(twin) == walked(text, 5, 8)
    assert tokens(session) == walked(text, 8, 8)


def drafted(rows: Any, history: list[int], **options: Any) -> tuple[list[int], Tensor | None]:
    request = Request(history, 50, sampling=Sampling(**options))
    found, q = make_proposer(request)(rows, history)
    return torch.as_tensor(found).tolist(), q


def rows_of(text: Text2, session: DFlash2Session) -> Any:
    hidden = text.uncached(5, 8)
    return session._rows(States(hidden, session._logits(hidden), torch.tensor(True)))


def test_banned_tokens_make_room_for_the_next_candidates() -> None:
    text, session = opened()
    rows, history = rows_of(text, session), text.ids[:6]
    free, _ = drafted(rows, history)
    held, _ = drafted(rows, history, bad_words=tuple((token,) for token in free))
    assert not set(free) & set(held)
    assert len(held) == 7


def test_options_on_the_host_draft_what_options_on_the_device_do() -> None:
    text, session = opened()
    rows, history = rows_of(text, session), text.ids[:6]
    on_device, _ = drafted(rows, history, presence_penalty=4.0)
    on_host, _ = drafted(rows, history, presence_penalty=4.0, processors=(lambda _ids, row: row,))
    assert on_device == on_host
    assert on_device != drafted(rows, history)[0]


def test_the_best_path_is_never_less_likely_than_the_walk() -> None:
    differs = 0
    for seed in range(6):
        text, session = opened(seed=seed)
        rows, history = rows_of(text, session), text.ids[:6]
        walk, _ = drafted(rows, history)
        best, q = drafted(rows, history, draft_path="best")
        assert q is None

        def mass(path: list[int], rows: Any = rows) -> float:
            steps = [rows.row(i, path[:i], None)[0].log_softmax(-1)[t] for i, t in enumerate(path)]
            return float(torch.stack(steps).sum())

        assert mass(best) >= mass(walk) - 1e-5
        differs += best != walk
    assert differs


def test_the_best_path_of_independent_rows_is_the_likeliest_token_of_each() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    found, q = drafted(logits, [1], draft_path="best", temperature=1.0, rule="rejection")
    assert found == logits.argmax(-1).tolist()
    assert q is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_stops_before_the_first_row_that_is_not_sure(temperature: float) -> None:
    text, session = opened()
    rows, history = rows_of(text, session), text.ids[:6]
    options = {"temperature": temperature, "rule": "rejection", "seed": 3}
    whole, _ = drafted(rows, history, **options)
    sure = [
        float(rows.row(i, whole[:i], None)[0].topk(4).values.softmax(-1)[0])
        for i in range(len(whole))
    ]
    for least in sorted(sure):
        found, q = drafted(rows, history, draft_p_min=least + 1e-6, **options)
        count = next((i for i, p in enumerate(sure) if p < least + 1e-6), len(sure))
        assert found == whole[:count]
        assert q is None or len(q) == count


def test_v1_drafts_stop_there_too() -> None:
    logits = torch.zeros(3, 40)
    logits[0, 7], logits[1, 8] = 9.0, 1.0
    assert drafted(logits, [1], draft_p_min=0.5)[0] == [7]
    assert drafted(logits, [1])[0] == [7, 8, 0]
    host = {"processors": (lambda _ids, row: row,)}
    assert drafted(logits, [1], draft_p_min=0.5, **host)[0] == [7]


WAYS: dict[str, dict[str, Any]] = {
    "rejection": {"rule": "rejection"},
    "block": {"rule": "block", "top_p": 0.9},
    "best path": {"rule": "rejection", "draft_path": "best"},
    "least confidence": {"rule": "rejection", "draft_p_min": 0.3},
}


def small() -> DFlash2DraftModel:
    return tiny_draft2(
        vocab_size=16, num_target_layers=2,
        nested={"target_layer_ids": [0, 1], "selector_top_k": 4},
    )  # fmt: skip


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_samples_follow_the_targets_law(options: dict[str, Any]) -> None:
    target, _ = models()
    session = TorchTargetSession(target, (0, 1), 64)
    drafting = DFlash2Session(small(), tables(target), 64)
    accepted = 0

    def sample(number: int) -> list[int]:
        nonlocal accepted
        request = Request(PROMPT, 5, sampling=Sampling(0.6, seed=number, **options))
        reuse = drafting.holds(PROMPT, session.holds(PROMPT, len(PROMPT) - 1))
        found: list[int] = []
        for step in decode(request, session, [drafting], Fixed(4), time.perf_counter_ns, reuse):
            found += step.tokens
            accepted += step.accepted
            if len(found) >= DEPTH:  # the rest is not judged
                break
        return found

    judged = audit("dflash2", sample, exact(Sampling(0.6, **options)), SAMPLES // 2)
    assert judged.passed, judged
    assert accepted > 0


class Knowing(DFlash2Session):
    """A DFlash2 session whose rows know the text, under a selector of random tables."""

    text: list[int]

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = whole(super()._logits(hidden))
        for row in range(logits.shape[0]):
            place = len(self._tokens) + row
            if place < len(self.text):
                logits[row, self.text[place]] += 1e4
        return logits


@pytest.mark.parametrize("block_size", [2, 3, 5, 8])
@pytest.mark.parametrize("path", ["walk", "best"])
def test_a_perfect_draft_is_never_wasted(block_size: int, path: Any) -> None:
    target, _ = models()
    text = [*PROMPT, *reference_generate(target, PROMPT, 41)]
    session = TorchTargetSession(target, (0, 1), 128)
    drafting = Knowing(small(), tables(target), 128)
    drafting.text = text
    request = Request(PROMPT, 41, sampling=Sampling(draft_path=path))
    steps = list(decode(request, session, [drafting], Fixed(block_size), time.perf_counter_ns))
    assert [token for step in steps for token in step.tokens] == text[len(PROMPT) :]
    rounds = [len(step.tokens) for step in steps[1:]]
    whole, rest = divmod(40, block_size)
    assert rounds == [block_size] * whole + [rest] * bool(rest)


def test_without_a_selectors_say_a_session_drafts_as_v1_does() -> None:
    second, first = tiny_draft2(), tiny_draft(is_causal=False)
    with torch.no_grad():
        for name, parameter in second.named_parameters():
            if "base_kernel" in name:
                parameter.zero_()[:, 0] = 1.0
            if "kernel_projection" in name or "successor" in name:
                parameter.zero_()
    first.load_state_dict({k: v for k, v in second.state_dict().items() if k in first.state_dict()})
    new, old = Text2(second), Text(first)
    ours: DFlashSession
    ours, theirs = new.open(), old.open()
    for sampling in (Sampling(), Sampling(0.7, top_k=3, rule="rejection", seed=2)):
        for text, session in ((new, ours), (old, theirs)):
            text.start(session, 9, sampling=sampling)
        assert tokens(ours) == tokens(theirs)
