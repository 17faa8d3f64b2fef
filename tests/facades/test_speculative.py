"""``dflash.speculative``: configs, the decoder and its states, over every form of target."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash.engine import load
from dflash.errors import ConfigError, EngineClosed, PairError, PromptError, UnknownName
from dflash.speculative import (
    SpeculativeConfig,
    SpeculativeConfigBuilder,
    SpeculativeDecoder,
    SpeculativeStats,
    State,
)

PROMPT = [72, 101, 108, 108, 111]


def plain(limit: int, **options: Any) -> list[int]:
    with load("toy") as engine:
        return list(engine.generate(PROMPT, max_tokens=limit, **options).token_ids)


def config(**changes: Any) -> SpeculativeConfig:
    return SpeculativeConfig(**{"max_new_tokens": 60, **changes})


# --- configs -------------------------------------------------------------------------------------


def test_the_defaults_are_those_people_know() -> None:
    found = SpeculativeConfig()
    assert (found.draft_tokens_per_step, found.max_new_tokens) == (4, 128)
    assert (found.min_acceptance_rate, found.strict_mode) == (0.3, False)
    with pytest.raises(FrozenInstanceError):
        found.strict_mode = True  # type: ignore[misc]


def test_the_profiles_have_the_documented_values() -> None:
    for name, values in (("conservative", (2, 0.5, True)), ("aggressive", (8, 0.15, False))):
        found = getattr(SpeculativeConfig, name)()
        assert found == SpeculativeConfig.profile(name)
        rest = (found.min_acceptance_rate, found.strict_mode)
        assert (found.draft_tokens_per_step, *rest) == values
        assert found.max_new_tokens == 128
    with pytest.raises(UnknownName, match="aggressive, conservative"):
        SpeculativeConfig.profile("reckless")


def test_the_builder_chains_and_checks_at_the_end() -> None:
    builder = SpeculativeConfigBuilder().draft_tokens_per_step(6).min_acceptance_rate(0.4)
    assert builder.build() == SpeculativeConfig(6, 128, 0.4, False)
    assert builder.max_new_tokens(9).strict_mode().build() == SpeculativeConfig(6, 9, 0.4, True)
    assert builder.strict_mode(False).build().strict_mode is False
    start = SpeculativeConfig.conservative()
    assert SpeculativeConfigBuilder(start).build() == start
    wrong = SpeculativeConfigBuilder().min_acceptance_rate(3)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        wrong.build()


@pytest.mark.parametrize(
    "values",
    [
        {"draft_tokens_per_step": 0},
        {"draft_tokens_per_step": 2.5},
        {"draft_tokens_per_step": True},
        {"max_new_tokens": 0},
        {"max_new_tokens": "9"},
        {"min_acceptance_rate": -0.1},
        {"min_acceptance_rate": 1.01},
        {"min_acceptance_rate": None},
        {"strict_mode": 1},
    ],
)
def test_impossible_values_are_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        SpeculativeConfig(**values)


# --- generating ----------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["toy:oracle", "toy:script:1,3,0", "toy:random", "ngram", "none"])
def test_the_tokens_are_those_of_plain_decoding(draft: str) -> None:
    with SpeculativeDecoder("toy", draft, config()) as decoder:
        assert decoder.generate(PROMPT) == plain(60)
        assert decoder.generate(np.array([PROMPT])) == plain(60)
        assert decoder.generate(PROMPT, temperature=0.8, seed=3) == plain(
            60, temperature=0.8, seed=3
        )
        assert decoder.generate(PROMPT, max_tokens=7) == plain(7)


@pytest.mark.parametrize("tree", [8, 24])
def test_a_tree_needs_no_floor_that_nobody_asked_for(tree: int) -> None:
    with SpeculativeDecoder("toy", "toy:script:1,3,0") as decoder:
        options: Any = {"draft_tree": tree, "max_tokens": 60, "stop_token_ids": []}
        assert decoder.generate(PROMPT, **options) == plain(60)
        assert decoder.stats.drafted > 4 * (decoder.stats.target_forward_passes - 1) or tree == 8
        with pytest.raises(ConfigError, match="gives chains up"):
            decoder.generate(PROMPT, min_acceptance_rate=0.3, **options)
    with (
        SpeculativeDecoder("toy", "toy:oracle", SpeculativeConfig.conservative()) as decoder,
        pytest.raises(ConfigError, match="gives chains up"),
    ):
        decoder.generate(PROMPT, draft_tree=tree)


def test_states_follow_the_text() -> None:
    with SpeculativeDecoder("toy", "toy:script:0", config()) as decoder:
        assert decoder.state is State.PREFILL
        seen = []
        for _ in decoder.stream(PROMPT):
            seen.append(decoder.state)
        order = [state for i, state in enumerate(seen) if state not in seen[:i]]
    assert order == [State.PREFILL, State.SPECULATING, State.FALLBACK, State.DONE]
    assert decoder.state is State.DONE
    with SpeculativeDecoder("toy", "none", config()) as decoder:
        decoder.generate(PROMPT)
        assert decoder.state is State.DONE


def test_a_new_text_starts_from_the_beginning() -> None:
    with SpeculativeDecoder("toy", "toy:oracle", config()) as decoder:
        decoder.generate(PROMPT)
        stream = decoder.stream(PROMPT)
        assert decoder.state is State.PREFILL
        assert decoder.stats == SpeculativeStats()
        next(stream)


def test_the_figures_of_a_perfect_draft() -> None:
    settings = config(draft_tokens_per_step=4, max_new_tokens=1 + 5 * 8)
    with SpeculativeDecoder("toy", "toy:oracle", settings) as decoder:
        decoder.generate(PROMPT)  # the first of a pair takes one plain step, to time it
        first = decoder.stats
        decoder.generate(PROMPT)
        stats = decoder.stats
    assert first.fallback_tokens == 2
    assert (stats.drafted, stats.accepted, stats.acceptance_rate) == (32, 32, 1.0)
    assert (stats.fallback_tokens, stats.target_forward_passes) == (1, 9)
    assert stats.estimated_speedup == pytest.approx((32 + 1) / 9)
    assert stats.generated_tokens == 41
    assert stats.measured_speedup is not None and stats.measured_speedup > 0
    assert stats.to_json()["estimated_speedup"] == stats.estimated_speedup


def test_plain_decoding_is_estimated_at_one() -> None:
    with SpeculativeDecoder("toy", "none", config()) as decoder:
        assert decoder.stats.estimated_speedup == 1.0
        decoder.generate(PROMPT)
        assert decoder.stats.estimated_speedup == 1.0
        assert decoder.stats.fallback_tokens == decoder.stats.generated_tokens == 60
        assert decoder.stats.acceptance_rate == 0.0


def test_a_useless_draft_is_given_up() -> None:
    with SpeculativeDecoder("toy", "toy:script:0", config(max_new_tokens=200)) as decoder:
        decoder.generate(PROMPT)
    assert decoder.stats.drafted < 60
    assert decoder.stats.fallback_tokens > 0.9 * decoder.stats.target_forward_passes


def test_one_text_without_its_prompt() -> None:
    with SpeculativeDecoder("toy", "toy:oracle") as decoder:
        for more in ({"n": 2}, {"echo": True}):
            with pytest.raises(ConfigError, match="leave out n and echo"):
                decoder.generate(PROMPT, **more)  # type: ignore[arg-type]


# --- forms of target and draft -------------------------------------------------------------------


def test_an_engine_stays_open_and_what_was_loaded_here_is_closed() -> None:
    with load("toy", "toy:oracle") as engine:
        with SpeculativeDecoder(engine, config=config()) as decoder:
            assert decoder.generate(PROMPT) == plain(60)
        assert engine.generate(PROMPT, max_tokens=3).token_ids
        with pytest.raises(ConfigError, match="has its draft already"):
            SpeculativeDecoder(engine, "toy:oracle")
    decoder = SpeculativeDecoder("toy", "toy:oracle")
    decoder.close()
    decoder.close()
    with pytest.raises(EngineClosed):
        decoder.generate(PROMPT)


def test_what_makes_no_pair_is_refused() -> None:
    with pytest.raises(ConfigError, match="SpeculativeConfig"):
        SpeculativeDecoder("toy", "toy:oracle", {"draft_tokens_per_step": 3})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="both as names"):
        SpeculativeDecoder("toy", object())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("torch")
    from tests.backends.tiny import tiny_target
    from tests.facades.drafts import save_draft

    folder: Path = save_draft(tmp_path_factory.mktemp("draft"))
    return tiny_target("llama", eos=None), folder


def test_models_that_the_user_holds_are_used_and_never_altered(models: Any) -> None:
    from dflash.model import DFlashDraftModel
    from tests.backends.tiny import reference_generate

    target, folder = models
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    modules = [type(module) for module in target.modules()]
    expected = reference_generate(target, PROMPT, 30)
    draft = DFlashDraftModel.from_pretrained(folder)
    for form in (draft, str(folder), folder, "ngram", f"{folder}+ngram", "none", None):
        with SpeculativeDecoder(target, form, config(max_new_tokens=30)) as decoder:
            assert decoder.generate(PROMPT) == expected
            assert decoder.stats.generated_tokens == 30
    assert [type(module) for module in target.modules()] == modules
    assert not any(module._forward_hooks for module in target.modules())
    assert all(weight.equal(before[name]) for name, weight in target.state_dict().items())


def test_text_needs_a_tokenizer_and_a_draft_must_be_one(models: Any) -> None:
    target, _ = models
    decoder = SpeculativeDecoder(target, "ngram")
    with pytest.raises(PromptError, match="token ids"):
        decoder.generate("hello")
    with pytest.raises(ConfigError, match="DFlashDraftModel"):
        SpeculativeDecoder(target, target)


def test_the_demo_draft_has_its_name_beside_a_model_too(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = models
    monkeypatch.setattr("dflash.demo.demo_draft", lambda: draft)
    decoder = SpeculativeDecoder(target, "demo+ngram")
    assert decoder.generate(PROMPT) == SpeculativeDecoder(target, "ngram").generate(PROMPT)


def test_a_draft_of_another_target_is_refused(models: Any) -> None:
    from dflash.model import DFlashDraftModel
    from tests.backends.tiny import tiny_target

    draft = DFlashDraftModel.from_pretrained(models[1])
    with pytest.raises(PairError, match="does not fit"):
        SpeculativeDecoder(tiny_target("llama", layers=1), draft)
