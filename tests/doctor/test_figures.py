"""What is counted, what is expected of it, and the sentence at the end. Nothing here is timed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

import dflash
from dflash.backends.toy import ToyModel, ToyPair
from dflash.cli.progress import Log
from dflash.core.types import Plan, Step, Verdict
from dflash.doctor.measured import RIVALS, acceptance, cost, examine
from dflash.doctor.measured.acceptance import Acceptance, added_up, cut, measure, over, texts_of
from dflash.doctor.measured.causality import other_causality
from dflash.doctor.measured.cost import Block, Cost, even_chance, expected
from dflash.doctor.measured.mask import other_masks
from dflash.doctor.measured.patient import admit
from dflash.doctor.measured.report import Report
from dflash.doctor.measured.rope import other_rope
from dflash.doctor.measured.taps import other_taps
from dflash.doctor.static.facts import Finding
from dflash.errors import ConfigError
from tests.cli.running import run


def counted(*histogram: int) -> Acceptance:
    """Rounds that all judged as many drafts as the histogram has room for."""
    kept = [i for i, n in enumerate(histogram) for _ in range(n)]
    return added_up([round_of(len(histogram) - 1, k) for k in kept])


def round_of(drafted: int, kept: int) -> Step:
    verdict: Verdict[Any] = Verdict([0] * (kept + 1), range(kept), drafted)
    return Step(verdict.tokens, Plan(0, drafted, drafted), drafted, verdict, 1)


def test_a_ratio_and_a_length_are_told_apart() -> None:
    endless = ToyModel(eos_ids=frozenset())
    pair = ToyPair(endless, draft_name="toy:script:3", script=[3])
    found = measure(pair, [[1, 2, 3], [4]], 61)
    assert found.mean_committed == 4.0, "tokens per round"
    assert found.rate == 3 / 15, "accepted of drafted"
    assert found.survival[:4] == (1.0, 1.0, 1.0, 0.0)
    assert (found.rounds, found.committed, found.accepted) == (30, 120, 90)


def test_conditional_chances_multiply_to_survival() -> None:
    found = counted(40, 30, 20, 10)
    assert found.conditional == pytest.approx((0.6, 0.5, 1 / 3))
    assert found.survival == pytest.approx((0.6, 0.3, 0.1))
    assert found.mean_committed == pytest.approx(1 + sum(found.survival))
    assert counted(10, 0, 0).conditional == (0.0, 0.0), "nothing after nothing"


def test_short_rounds_do_not_count_against_places_they_never_reached() -> None:
    found = added_up([round_of(1, 1), round_of(1, 1), round_of(3, 2), round_of(3, 3)])
    assert found.conditional == (1.0, 1.0, 0.5)
    assert found.histogram == (0, 2, 1, 1)


def test_better_means_by_more_than_chance_and_by_enough() -> None:
    poor, good = counted(80, 15, 5), counted(20, 30, 50)
    assert good.clearly_above(poor)
    assert not poor.clearly_above(good)
    assert not poor.clearly_above(poor)
    assert not counted(1, 1, 1).clearly_above(counted(2, 1, 0)), "three rounds prove nothing"
    many = counted(7800, 1700, 500)
    assert not many.clearly_above(counted(8000, 1500, 500)), "certain, and not worth a word"


def test_break_even_is_the_chance_that_pays_for_the_block() -> None:
    for chance in (0.1, 0.5, 0.9):
        price = sum(chance**i for i in range(4))
        assert even_chance(3, price) == pytest.approx(chance)
    assert even_chance(3, 4.5) is None
    assert even_chance(3, 1.0) == pytest.approx(0.0)


def test_a_shorter_block_is_expected_to_commit_what_survives_in_it() -> None:
    survival = (0.8, 0.5, 0.2)
    assert [expected(survival, b) for b in (1, 2, 3, 4, 9)] == pytest.approx(
        [1, 1.8, 2.3, 2.5, 2.5]
    )


def priced(verify: float, draft: float, committed: float, plain: float = 10.0) -> Cost:
    whole = Block(8, verify, draft, (verify + draft) / plain, committed)
    return Cost((Block(1, plain, 0.0, 1.0, 1.0), whole))


def test_the_sentence_names_the_slower_part() -> None:
    verify = Report((), counted(0, 0, 0, 9), priced(verify=60.0, draft=2.0, committed=4.0)).sentence
    assert verify.startswith("ok: 4.00 committed per pass; no block pays here")
    assert "the slow part is the verify pass" in verify
    assert "8 rows cost 6.00 times one row" in verify
    draft = Report((), counted(0, 0, 0, 9), priced(verify=12.0, draft=8.0, committed=4.0)).sentence
    assert "block 8 should run at 2.00 times plain decoding" in draft
    assert "the slow part is the draft (8.0 of 10.0 ms" in draft
    level = Report((), counted(0, 0, 0, 9), priced(verify=9.0, draft=0.0, committed=4.0)).sentence
    assert "a round takes no longer than a plain step" in level and "slow part" not in level


@pytest.mark.parametrize(
    ("histogram", "levels", "verdict"),
    [
        ((0, 0, 9), (), "ok"),
        ((0, 0, 9), ("note",), "ok"),
        ((0, 0, 9), ("warning",), "weak"),
        ((0, 0, 9), ("error",), "broken"),
        ((70, 20, 10), (), "weak"),
        ((99, 1, 0), (), "broken"),
    ],
)
def test_the_verdict_follows_fit_and_acceptance(
    histogram: tuple[int, ...], levels: tuple[Any, ...], verdict: str
) -> None:
    findings = tuple(Finding(level, "taps", "what to do") for level in levels)
    report = Report(findings, counted(*histogram), priced(11.0, 1.0, 2.0))
    assert report.verdict == verdict
    assert report.sentence.startswith(f"{verdict}: ")
    assert report.sentence.count("\n") == 0
    assert json.loads(json.dumps(report.to_json()))["verdict"] == verdict


def test_costs_are_counted_in_whole_rounds_of_every_size() -> None:
    with dflash.load("toy", "toy:script:3") as engine:
        found = cost.measure(engine.pair, engine.encode("Why?"), (1.0, 1.0, 1.0, 0.0))
    assert [block.block_size for block in found.blocks] == [1, 2, 4, 6, 8, 12, 16]
    assert [block.committed for block in found.blocks] == [1, 2, 4, 4, 4, 4, 4]
    assert found.blocks[0].cost == 1.0 and found.blocks[0].draft_ms == 0.0
    assert all(block.verify_ms > 0 and block.cost > 0 for block in found.blocks)
    assert found.best_drafted.block_size > 1


def patient(tokenizer: Any = None, theta: float | None = 10000.0, **spec: Any) -> Any:
    given = {
        "taps": (1, 4),
        "mask_token_id": 7,
        "causal": (False, False),
        "rope_parameters": {"full_attention": {"rope_theta": 10000.0}},
        **spec,
    }
    pair = SimpleNamespace(tokenizer=tokenizer, vocab_size=20, eos_ids=frozenset({2}))
    return SimpleNamespace(
        spec=SimpleNamespace(**given),
        probe=SimpleNamespace(layers=6, rope_theta=theta),
        engine=SimpleNamespace(pair=pair),
    )


def test_taps_are_shifted_as_far_as_there_are_layers() -> None:
    assert [r.changes["taps"] for r in other_taps(patient())] == [(0, 3), (2, 5)]
    assert [r.changes["taps"] for r in other_taps(patient(taps=(0, 3)))] == [(1, 4)]
    assert [r.changes["taps"] for r in other_taps(patient(taps=(0, 5)))] == []


class Words:
    """Part of a tokenizer of 18 tokens; a head of 20 rows has two more."""

    all_special_ids = (0, 1, 2, 25)
    mask_token_id, unk_token_id, pad_token_id, bos_token_id = None, 0, None, 1
    added_tokens_decoder: dict[int, Any] = {9: SimpleNamespace(special=True)}  # noqa: RUF012

    def __len__(self) -> int:
        return 18

    def get_added_vocab(self) -> dict[str, int]:
        return {"<|MASK|>": 11, "<tool>": 12}

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"<{token}>"


def test_masks_are_tried_with_the_likeliest_first() -> None:
    rivals = list(other_masks(patient(Words())))
    assert [r.changes["mask_token_id"] for r in rivals] == [11, 18, 0, 1, 9]
    assert "<11>" in rivals[0].what and "than with 7" in rivals[0].what
    assert list(other_masks(patient(object()))) == [], "a tokenizer that says nothing"


def test_causality_is_turned_round_where_layers_agree_and_made_one_where_they_do_not() -> None:
    assert [r.changes["causal"] for r in other_causality(patient())] == [(True, True)]
    mixed = patient(causal=(True, False))
    assert [r.changes["causal"] for r in other_causality(mixed)] == [(False, False), (True, True)]


def test_the_targets_base_frequency_is_tried_where_the_draft_has_another() -> None:
    assert list(other_rope(patient())) == []
    assert list(other_rope(patient(theta=None))) == []
    (rival,) = other_rope(patient(theta=1e6))
    assert rival.changes["rope_parameters"]["full_attention"]["rope_theta"] == 1e6


def test_every_check_is_in_a_file_of_its_own() -> None:
    assert len({check.__module__ for check in RIVALS}) == len(RIVALS)


def test_a_pair_without_a_draft_has_nothing_to_examine() -> None:
    with pytest.raises(ConfigError, match="--draft"):
        examine(lambda: dflash.load("toy"), ["Why?"])


TOY = ("doctor", "--model", "toy", "--max-tokens", 24)


def test_an_oracle_is_ok_and_a_random_draft_is_broken() -> None:
    fine = run(*TOY, "--draft", "toy:oracle")
    assert (fine.code, fine.out.splitlines()[-1][:12]) == (0, "verdict: ok:")
    assert "acceptance: prompt 1 of 12" in fine.err
    broken = run(*TOY, "--draft", "toy:random")
    assert broken.code == 1
    assert "verdict: broken" in broken.out and "almost nothing is accepted" in broken.out


def test_a_look_up_that_finds_nothing_is_no_broken_draft() -> None:
    found = run(*TOY, "--draft", "ngram")
    assert found.code == 0
    verdict = found.out.splitlines()[-1]
    assert verdict.startswith("verdict: weak: ")
    assert "look-up found nothing" in verdict or "hardly repeat" in verdict


def test_the_speed_of_a_look_up_is_that_of_rounds_in_which_it_finds_something() -> None:
    costs = priced(verify=9.0, draft=0.0, committed=4.0)
    found = Report((), counted(99, 0, 0, 9), costs, look_up=True).sentence
    assert "; where it finds something, block " in found
    assert "where it" not in Report((), counted(99, 0, 0, 9), costs).sentence


def test_a_mean_of_all_rounds_and_one_of_the_texts_means_are_told() -> None:
    with dflash.load("toy", "toy:oracle") as engine:
        long, short = engine.encode("Why?"), engine.encode("How?")
        whole = measure(engine.pair, [long], 60)
        both = measure(engine.pair, [long, short], 60)
    assert len(both.by_text) == 2 and both.by_text[0] == whole.mean_committed
    assert both.macro_committed == pytest.approx(sum(both.by_text) / 2)
    assert both.to_json()["macro_committed"] == both.macro_committed


def test_json_has_findings_figures_and_verdict() -> None:
    told = json.loads(run(*TOY, "--draft", "toy:script:3", "--json").out)
    assert {"verdict", "sentence", "findings", "acceptance", "cost", "break_even"} <= set(told)
    assert told["acceptance"]["mean_committed"] > 3
    assert {"block_size", "verify_ms", "draft_ms", "cost", "speed"} <= set(told["cost"][0])


def test_the_table_shows_both_ratios() -> None:
    out = run(*TOY, "--draft", "toy:script:3").out
    assert "committed per pass: " in out and "drafts accepted: " in out
    assert "once the one before was kept: 1.00 1.00 1.00 0.00" in out
    assert "block  verify ms  draft ms  pays from" in out


def test_a_noisy_machine_is_said_beside_the_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("doctor", "--model", "toy", "--draft", "toy:oracle", "--max-tokens", 8)
    for times, noisy in ([100, 101, 99], False), ([100, 150, 99], True):
        turns = iter(times * 1000)
        monkeypatch.setattr(cost, "_times", lambda *_, t=turns: [next(t)])
        monkeypatch.setattr(cost, "SIZES", (1, 2))
        found = run(*words)
        assert ("noisy machine" in found.err) is noisy
        assert "break-even" in found.out


def test_a_shorter_text_is_the_beginning_of_a_longer_one() -> None:
    pair = ToyPair(ToyModel(eos_ids=frozenset()), draft_name="toy:script:3,0,1", script=[3, 0, 1])
    prompts = [[1, 2, 3], [4]]
    long = list(texts_of(pair, prompts, 48))
    for tokens in (2, 7, 24, 48):
        assert over([cut(text, tokens) for text in long]) == measure(pair, prompts, tokens)


class Variants:
    """A probe whose variants draft as their script says."""

    def variant(self, script: int) -> ToyPair:
        model = ToyModel(eos_ids=frozenset())
        return ToyPair(model, draft_name=f"toy:script:{script}", script=[script])


@pytest.mark.parametrize(("script", "better"), [(0, False), (1, False), (3, True)])
def test_a_reading_that_is_no_better_on_the_first_prompt_is_not_tried_on_the_others(
    script: int, better: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    real = acceptance.rounds

    def counting(pair: Any, prompt: Any, *more: Any) -> Any:
        tried.append(len(prompt))
        return real(pair, prompt, *more)

    with dflash.Engine(Variants().variant(1)) as engine:
        sick = admit(engine, Variants(), ["a", "b", "c"], 24, lambda _: None)  # type: ignore[arg-type]
    monkeypatch.setattr(acceptance, "rounds", counting)
    found = sick.under(script=script)
    assert (found is not None) == better
    assert len(tried) == (3 if better else 1)
    assert found is None or found.clearly_above(sick.brief)


def test_every_step_is_told() -> None:
    steps: list[str] = []
    toy = "toy", "toy:script:3"
    examine(lambda: dflash.load(*toy), ["Why?", "So?"], 12, steps.append)
    parts = list(dict.fromkeys(step.partition(":")[0] for step in steps))
    assert parts == ["loading", "acceptance", "checks", "cost of a round"]
    assert "acceptance: prompt 2 of 2" in steps
    assert any(step.startswith("cost of a round: block 16, run 3 of 3") for step in steps)


def test_a_log_gets_a_line_a_part_and_one_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 1.0, 2.0, 13.0, 14.0])
    log = Log(lambda: next(clock))
    for step in ("a: 1", "a: 2", "b: 1", "b: 2", "b: 3"):
        log(step)
    assert capsys.readouterr().err == "a: 1 ...\nb: 1 ...\nb: 2 ...\n"


def test_the_command_tells_its_steps_but_not_to_a_program() -> None:
    toy = ("doctor", "--model", "toy", "--draft", "toy:script:3", "--max-tokens", 12)
    assert "cost of a round: block 1, run 1 of 3 ..." in run(*toy).err
    assert "cost of a round" not in run(*toy, "--json").err
