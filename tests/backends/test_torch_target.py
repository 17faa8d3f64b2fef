"""The torch target session: features, positions, rollback, reuse, and the tokens it picks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dflash.backends.torch.features import Taps, decoder_layers
from dflash.backends.torch.grouped import group_attention
from dflash.backends.torch.packed import pack_model
from dflash.backends.torch.sampling import greedy
from dflash.backends.torch.target import TorchTargetSession
from dflash.core.types import PLAIN, Proposal, Request, Sampling, Verdict
from dflash.errors import CheckpointError, PairError, WeightsError

from .tiny import LAYERS, reference_generate, tiny_target

KINDS = ("llama", "qwen3", "swa", "gemma3")
PROMPT = [5, 7, 300, 20, 41, 99, 3, 256, 77, 12, 8, 411, 30]  # longer than the 8-token window


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_target(request.param, dtype=torch.float64)


def every_layer(model: Any, ids: Sequence[int]) -> list[torch.Tensor]:
    """Outputs of all decoder layers in one plain pass, by hooks of our own."""
    kept: list[torch.Tensor] = []
    layers = model.model.layers
    handles = [
        layer.register_forward_hook(lambda _m, _a, out: kept.append(out)) for layer in layers
    ]
    with torch.inference_mode():
        model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    for handle in handles:
        handle.remove()
    return [out[0] if isinstance(out, torch.Tensor) else out[0][0] for out in kept]


def start(session: TorchTargetSession, prompt: Sequence[int] = PROMPT, reuse: int = 0) -> int:
    """Prefill; returns the first token."""
    verdicts = list(session.prefill(Request(list(prompt), 100), reuse))
    return verdicts[-1].tokens[0]


@pytest.mark.parametrize("layer", range(LAYERS))
def test_features_are_the_outputs_of_the_tapped_layer(model: Any, layer: int) -> None:
    session = TorchTargetSession(model, (layer,), 64)
    (verdict,) = session.prefill(Request(PROMPT, 10), 0)
    assert verdict.features is not None
    torch.testing.assert_close(verdict.features, every_layer(model, PROMPT)[layer])


def test_taps_stand_side_by_side_in_the_order_they_were_named(model: Any) -> None:
    session = TorchTargetSession(model, (3, 0), 64)
    (verdict,) = session.prefill(Request(PROMPT, 10), 0)
    states = every_layer(model, PROMPT)
    assert verdict.features is not None
    torch.testing.assert_close(verdict.features, torch.cat([states[3], states[0]], dim=-1))


def test_the_last_layer_is_tapped_before_the_final_norm() -> None:
    model = tiny_target("llama", dtype=torch.float64)
    session = TorchTargetSession(model, (LAYERS - 1,), 64)
    (verdict,) = session.prefill(Request(PROMPT, 10), 0)
    with torch.inference_mode():
        normed = model.model(input_ids=torch.tensor([PROMPT])).last_hidden_state[0]
        assert verdict.features is not None
        torch.testing.assert_close(model.model.norm(verdict.features), normed)
        assert not torch.allclose(verdict.features, normed)


@pytest.mark.parametrize("layer", [-1, LAYERS, 40])
def test_a_tap_outside_the_target_is_refused_when_the_session_opens(layer: int) -> None:
    with pytest.raises(PairError, match=f"taps layer {layer}.*layers 0 to {LAYERS - 1}"):
        TorchTargetSession(tiny_target(), (1, layer), 64)


def test_without_taps_no_features_are_kept() -> None:
    session = TorchTargetSession(tiny_target(), (), 64)
    (verdict,) = session.prefill(Request(PROMPT, 10), 0)
    assert verdict.features is None
    assert session.verify(PLAIN).features is None


def test_no_hook_stays_on_the_model() -> None:
    model = tiny_target()
    session = TorchTargetSession(model, (0, 2), 64)
    start(session)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_forward_of_another_thread_does_not_disturb_the_features() -> None:
    model = tiny_target()
    taps, other = Taps(model, (1,)), torch.tensor([[9, 9, 9]])
    ids = torch.tensor([PROMPT])
    with torch.inference_mode(), taps.capture():
        model(input_ids=ids)
        thread = threading.Thread(target=lambda: model(input_ids=other))
        thread.start()
        thread.join()
        features = taps.take()
    assert features is not None and features.shape == (len(PROMPT), 64)


def test_a_model_without_a_list_of_layers_says_that_it_cannot_be_tapped() -> None:
    model = tiny_target()
    model.config.num_hidden_layers = 7
    with pytest.raises(CheckpointError, match="no list of 7 decoder layers"):
        decoder_layers(model)


@pytest.mark.parametrize("chunk", [1, 5, len(PROMPT), 512])
def test_the_prompt_may_be_cut_into_chunks_of_any_size(model: Any, chunk: int) -> None:
    session = TorchTargetSession(model, (1,), 64, chunk=chunk)
    verdicts = list(session.prefill(Request(PROMPT, 10), 0))
    assert [v.rows for v in verdicts[:-1]] == [chunk] * (len(verdicts) - 1)
    assert all(v.tokens == [] for v in verdicts[:-1])
    assert verdicts[-1].tokens == reference_generate(model, PROMPT, 1)
    features = torch.cat([v.features for v in verdicts if v.features is not None])
    torch.testing.assert_close(features, every_layer(model, PROMPT)[1])


@pytest.mark.parametrize("right", [0, 1, 3, 6])
def test_every_number_of_kept_tokens_continues_as_plain_decoding(model: Any, right: int) -> None:
    truth = reference_generate(model, PROMPT, 30)
    for kept in range(1, right + 2):
        session = TorchTargetSession(model, (1, 3), 64)
        assert start(session) == truth[0]
        drafts = truth[1 : right + 1] + [(t + 1) % 512 for t in truth[right + 1 : 8]]
        verdict = session.verify(Proposal(drafts, len(drafts)))
        assert verdict.tokens == truth[1 : right + 2]
        assert len(verdict.path) == right and verdict.rows == right + 1
        states = every_layer(model, PROMPT + truth[: right + 1])
        expected = torch.cat([states[1], states[3]], dim=-1)[len(PROMPT) :]
        assert verdict.features is not None
        torch.testing.assert_close(verdict.features, expected)
        session.commit(kept)
        out = truth[: 1 + kept]
        while len(out) < 20:
            out += session.verify(PLAIN).tokens
            session.commit(1)
        assert out == truth[:20]


def test_drafts_may_stay_on_the_device_as_a_tensor() -> None:
    model = tiny_target()
    truth = reference_generate(model, PROMPT, 8)
    session = TorchTargetSession(model, (), 64)
    start(session)
    drafts = torch.tensor([*truth[1:4], (truth[4] + 1) % 512])
    assert session.verify(Proposal(drafts, 4)).tokens == truth[1:5]


def test_a_second_request_reuses_the_longest_common_prefix(model: Any) -> None:
    session = TorchTargetSession(model, (2,), 128)
    first = start(session)
    session.verify(PLAIN)
    session.commit(1)
    longer = [*PROMPT, first, 90, 91]
    assert session.holds(longer, 100) == len(PROMPT) + 1
    assert session.holds(longer, 4) == 4
    assert session.holds([5, 7, 1], 100) == 2
    assert session.holds([1], 100) == 0
    reuse = session.holds(longer, len(longer) - 1)
    verdicts = list(session.prefill(Request(longer, 10), reuse))
    assert sum(v.rows for v in verdicts) == 2, "only the new tokens run"
    assert verdicts[-1].tokens == reference_generate(model, longer, 1)


def test_prompts_of_changing_length_leave_no_trace_in_a_session() -> None:
    model = tiny_target("swa")
    session = TorchTargetSession(model, (1,), 128)
    for length in (40, 5, 40, 1, 17):
        prompt = [(7 * i + length) % 512 for i in range(length)]
        truth = reference_generate(model, prompt, 12)
        out = [start(session, prompt)]
        while len(out) < 12:
            out += session.verify(PLAIN).tokens
            session.commit(1)
        assert out == truth


def test_an_abandoned_prefill_leaves_a_prefix_that_can_be_resumed() -> None:
    model = tiny_target()
    session = TorchTargetSession(model, (), 64, chunk=4)
    prefill: Any = session.prefill(Request(PROMPT, 10), 0)
    next(prefill)
    next(prefill)
    prefill.close()
    assert session.holds(PROMPT, 100) == 8
    assert start(session, PROMPT, 8) == reference_generate(model, PROMPT, 1)[0]


def test_a_fork_goes_its_own_way(model: Any) -> None:
    truth = reference_generate(model, PROMPT, 12)
    session = TorchTargetSession(model, (1,), 64)
    start(session)
    twin = session.fork()
    session.verify(Proposal([1, 2, 3], 3))
    session.commit(1)
    out = [truth[0]]
    while len(out) < 12:
        out += twin.verify(PLAIN).tokens
        twin.commit(1)
    assert out == truth


def test_closing_frees_the_cache_and_may_be_repeated() -> None:
    session = TorchTargetSession(tiny_target(), (), 64)
    start(session)
    assert session.bytes() == 4 * 2 * 64 * 2 * 16 * 4  # layers, k and v, rows, heads, width, bytes
    session.close()
    session.close()
    assert session.bytes() == 0 and session.holds(PROMPT, 9) == 0


def test_steps_of_the_loop_in_the_wrong_order_are_caught() -> None:
    session = TorchTargetSession(tiny_target(), (), 64)
    start(session)
    with pytest.raises(AssertionError, match="commit follows verify"):
        session.commit(1)
    verdict = session.verify(Proposal([1, 2], 2))
    with pytest.raises(AssertionError, match="not in the verdict"):
        session.commit(len(verdict.tokens) + 1)


@pytest.mark.parametrize("first", [0, 3, 255, 400])
@pytest.mark.parametrize("second", [1, 511])
@pytest.mark.parametrize("loaded", [False, True])
def test_of_two_equal_logits_the_lowest_id_wins_on_every_path(
    first: int, second: int, loaded: bool
) -> None:
    model = tiny_target()
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([PROMPT])).last_hidden_state[0, -1]
        model.lm_head.weight[first] = model.lm_head.weight[second] = hidden  # far above the rest
    if loaded:
        pack_model(model)
        group_attention(model)
    low = min(first, second)
    session = TorchTargetSession(model, (), 64)
    assert start(session) == low
    for rows in range(1, 17):
        session = TorchTargetSession(model, (), 64)
        start(session, PROMPT[:-1])
        logits, _ = session._run([PROMPT[-1], *PROMPT[: rows - 1]], keep=0)
        assert int(greedy(logits)[0]) == low, f"{rows} rows"


def test_a_seeded_sample_does_not_depend_on_blocks_or_drafts() -> None:
    model = tiny_target()
    sampling = Sampling(temperature=0.9, top_k=50, top_p=0.9, seed=7)

    def run(block: int) -> list[int]:
        session = TorchTargetSession(model, (), 128)
        (verdict,) = session.prefill(Request(PROMPT, 40, sampling=sampling), 0)
        out = verdict.tokens
        while len(out) < 30:
            drafts = [(out[-1] * i) % 512 for i in range(1, block)]
            verdict = session.verify(Proposal(drafts, len(drafts)))
            session.commit(len(verdict.tokens))
            out = out + verdict.tokens
        return out[:30]

    plain = run(1)
    assert len(set(plain)) > 10
    assert run(4) == plain and run(16) == plain


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_raise_instead_of_ranking(bad: float) -> None:
    model = tiny_target()
    with torch.no_grad():
        model.model.norm.weight[0] = bad
    session = TorchTargetSession(model, (), 64)
    with pytest.raises(WeightsError, match="not finite"):
        start(session)


def test_a_verdict_with_a_draft_of_fewer_rows_counts_what_was_judged() -> None:
    session = TorchTargetSession(tiny_target(), (), 64)
    start(session)
    verdict: Verdict[torch.Tensor] = session.verify(Proposal([1, 2, 3], 3))
    assert verdict.drafted == 3
    session.commit(1)
    assert session.verify(PLAIN).drafted == 0
