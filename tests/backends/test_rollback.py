"""Recurrent states come back exactly, at every acceptance length; faults R58, R59 and R61."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
)

from dflash.backends.torch.load import wrap_target
from dflash.backends.torch.rollback import Rewind
from dflash.backends.torch.target import TorchTargetSession
from dflash.core.types import PLAIN, Proposal, Request
from dflash.errors import CheckpointError

from .families import FAMILIES, HYBRIDS, family
from .tiny import VOCAB

BLOCK = 6
PROMPT = [71, 103, 35, 290, 120, 33, 64, 8, 401]


def opened(model: Any, prompt: list[int], reuse: int = 0, taps: tuple[int, ...] = ()) -> Any:
    session = TorchTargetSession(model, taps, 128, chunk=4)
    list(session.prefill(Request(prompt, 30), reuse))
    return session


def held(session: Any) -> list[torch.Tensor]:
    """Every tensor of the cache that counts: keys and values up to the length, states."""
    parts = []
    for layer in session._cache.layers:
        if getattr(layer, "keys", None) is not None:
            parts += [side[:, :, : session._cache.length] for side in (layer.keys, layer.values)]
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            parts += [state for state in states.values() if state is not None]
    return parts


def after_block(model: Any, truth: list[int], right: int, kept: int) -> Any:
    """A session after one block of which ``right`` drafts were right and ``kept`` tokens kept."""
    session = opened(model, PROMPT)
    drafts = [*truth[1 : 1 + right], *[(token + 1) % VOCAB for token in truth[1 + right : BLOCK]]]
    verdict = session.verify(Proposal(drafts, len(drafts)))
    assert verdict.tokens == truth[1 : 2 + right]
    session.commit(kept)
    return session


def said(model: Any, count: int) -> list[int]:
    """What the model says after PROMPT, one token at a time."""
    session, tokens = opened(model, PROMPT), []
    tokens = session._tokens[len(PROMPT) :]
    for _ in range(count - 1):
        tokens += session.verify(PLAIN).tokens
        session.commit(1)
    return list(tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_after_any_cut_of_a_block_the_cache_is_that_of_the_kept_tokens_alone(name: str) -> None:
    model = family(name)
    truth = said(model, 2 * BLOCK)
    for right in range(BLOCK):
        for kept in sorted({1, right + 1}):
            session = after_block(model, truth, right, kept)
            fresh = opened(model, [*PROMPT, *truth[:kept]])
            for mine, its in zip(held(session), held(fresh), strict=True):
                torch.testing.assert_close(mine, its, rtol=1e-4, atol=2e-5)
            assert session.verify(PLAIN).tokens == truth[kept + 1 : kept + 2]


@pytest.mark.parametrize("name", HYBRIDS)
def test_that_test_would_see_a_state_that_was_not_taken_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family(name)
    truth = said(model, 2 * BLOCK)
    fresh = opened(model, [*PROMPT, *truth[:2]])
    monkeypatch.setattr(Rewind, "_replay", lambda *_: None)  # what a plain crop does
    pairs = zip(held(after_block(model, truth, 1, 2)), held(fresh), strict=True)
    assert any((mine - its).abs().max() > 1e-2 for mine, its in pairs)


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_same_prompt_resumes_at_its_last_token_and_says_the_same(name: str) -> None:
    model = family(name)
    truth = said(model, 8)
    session = after_block(model, truth, 2, 3)
    reuse = session.holds(PROMPT, len(PROMPT) - 1)
    assert reuse == len(PROMPT) - 1
    (verdict,) = session.prefill(Request(PROMPT, 30), reuse)
    assert verdict.tokens == truth[:1] and verdict.rows == 1
    assert session.verify(Proposal(truth[1:5], 4)).tokens == truth[1:6]


@pytest.mark.parametrize("name", HYBRIDS)
def test_any_other_prefix_resumes_where_a_state_is_kept_and_no_later(name: str) -> None:
    model = family(name)
    truth = said(model, 8)
    session = after_block(model, truth, 2, 3)
    assert session.holds([*PROMPT, *truth[:2], 5], 99) == len(PROMPT) + 2  # inside the last block
    other = [*PROMPT[:-1], 17, 18]
    assert session.holds(other, 99) == len(PROMPT) - 1
    assert session.holds([*PROMPT[:3], 17], 99) == 0
    first = list(session.prefill(Request(other, 30), session.holds(other, 99)))
    assert first[-1].tokens == list(opened(model, other)._tokens[len(other) :])


def test_rows_run_again_before_the_resumed_place_are_in_no_verdict() -> None:
    model = family("qwen3_5")
    session = opened(model, PROMPT, taps=(1,))
    reuse = 5  # a draft that holds less than the target
    verdicts = list(session.prefill(Request(PROMPT, 30), reuse))
    fresh = TorchTargetSession(model, (1,), 128)
    features = torch.cat([v.features for v in fresh.prefill(Request(PROMPT, 30), 0)])
    assert sum(verdict.rows for verdict in verdicts) == len(PROMPT) - reuse
    found = torch.cat([verdict.features for verdict in verdicts])
    torch.testing.assert_close(found, features[reuse:], rtol=1e-4, atol=1e-5)


def test_a_fork_and_its_session_do_not_share_a_state() -> None:
    model = family("qwen3_next")
    truth = said(model, 8)
    session = opened(model, PROMPT)
    twin = session.fork()
    session.verify(Proposal([5, 6, 7], 3))
    session.commit(1)
    assert twin.verify(Proposal(truth[1:5], 4)).tokens == truth[1:6]
    assert twin.bytes() > 0
    twin.close()
    assert session.verify(PLAIN).tokens


@pytest.mark.parametrize("name", HYBRIDS)
def test_random_blocks_leave_the_text_of_plain_decoding(name: str) -> None:
    rng, model = random.Random(3), family(name)
    truth = said(model, 60)
    session, place = opened(model, PROMPT), 1
    while place < 50:
        drafts = truth[place : place + rng.randint(0, BLOCK)]
        wrong = rng.randint(0, len(drafts))
        drafts = [*drafts[:wrong], *[(t + 1) % VOCAB for t in drafts[wrong:]]]
        verdict = session.verify(Proposal(drafts, len(drafts)))
        assert verdict.tokens == truth[place : place + wrong + 1]
        kept = rng.randint(1, wrong + 1)
        session.commit(kept)
        place += kept


TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
RESTARTING: dict[str, Any] = {
    "mamba": lambda: MambaForCausalLM(MambaConfig(**TINY, state_size=4)),
    "bamba": lambda: BambaForCausalLM(
        BambaConfig(
            **TINY,
            intermediate_size=32,
            num_attention_heads=2,
            num_key_value_heads=2,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=4,
            attn_layer_indices=[1],
        )
    ),
}


@pytest.mark.parametrize("name", RESTARTING)
def test_a_model_that_restarts_its_state_in_a_block_is_refused_at_load(name: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(CheckpointError, match="not in the same state after a rejected draft"):
        wrap_target(RESTARTING[name]().eval())


def test_a_model_that_wants_a_cache_of_its_own_is_refused_in_one_sentence() -> None:
    config = MiniMaxConfig(
        **TINY, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16
    )
    with pytest.raises(CheckpointError, match="cannot be taken back after a rejected"):
        wrap_target(MiniMaxForCausalLM(config).eval())


def test_a_cache_of_a_hybrid_counts_the_bytes_of_its_states() -> None:
    model = family("qwen3_5")
    session = opened(model, PROMPT)
    states = sum(layer.bytes() for layer in session._cache.states)
    assert 0 < states < session._cache.bytes() < session.bytes()
