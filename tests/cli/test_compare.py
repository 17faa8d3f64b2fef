"""``dflash compare``: what it says of a pair, and what it refuses before loading one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash.backends.toy import ToyModel, ToyPair
from dflash.cli.compare import lines
from dflash.comparison import Trial, compare, divergence, settle_algorithm
from dflash.engine import Engine
from dflash.errors import ConfigError
from dflash.gguf_file import read_header
from tests.cli.running import run

FLAGS = ("--prompt", "Once", "--max-tokens", 24, "--warmup-tokens", 4, "--runs", 2)


def test_both_arms_are_compared_in_one_run() -> None:
    found = run(
        *("compare", "--model", "toy", "--draft", "toy:script:3,0"),
        *("--draft-tokens", "3,7", "--json", *FLAGS),
    )
    assert found.code == 0
    result = json.loads(found.out)
    assert result["same"] and result["algorithm"] == "dflash"
    assert [arm["draft_tokens"] for arm in result["arms"]] == [0, 3, 7]
    for arm in result["arms"]:
        assert arm["tokens_match"] and arm["deterministic"] and arm["first_divergence"] is None
    rejecting, rounds = result["arms"][2]["rollbacks"], result["arms"][2]["stats"]["rounds"]
    assert rounds - 2 <= rejecting <= rounds, "but for short blocks at the end of the text"
    assert result["arms"][0]["rollbacks"] == 0


def test_rounds_without_a_draft_roll_nothing_back() -> None:
    words = ("compare", "--model", "toy", "--draft-tokens", "3", "--json", *FLAGS)
    for draft in ("toy:oracle", "ngram"):
        arm = json.loads(run(*words, "--draft", draft).out)["arms"][1]
        rejected = arm["stats"]["rounds"] - arm["stats"]["histogram"][-1]
        assert arm["rollbacks"] <= rejected and (draft == "ngram" or not arm["rollbacks"])


def test_the_report_has_a_row_for_each_number_of_drafts() -> None:
    found = run(
        *("compare", "--model", "toy", "--draft", "toy:oracle", "--draft-tokens", "1,99"),
        *(*FLAGS, "--verbose"),
    )
    assert found.code == 0
    assert "kept at draft 1, 2, ... of 15" in found.out
    assert "clamped      this draft proposes 15 at most: 99 ran as 15" in found.out
    assert "this draft proposes 15 at most: 99 run as 15" in found.err
    assert "--- 0 drafts" in found.out
    assert "selector" not in found.out, "this draft has none"
    assert "rollbacks: rounds that rejected a draft" in found.out
    assert "deterministic: yes" in found.out


def test_drafts_that_were_clamped_are_in_the_json() -> None:
    words = ("compare", "--model", "toy", "--draft", "toy:oracle", "--json", *FLAGS)
    for asked, clamped in (("3,20,99,20", [20, 99]), ("3,15", [])):
        found = json.loads(run(*words, "--draft-tokens", asked).out)
        assert [arm["draft_tokens"] for arm in found["arms"]] == [0, 3, 15]
        assert found["clamped_from"] == clamped


def test_trees_join_every_arm_but_the_ordinary_one() -> None:
    words = ("compare", "--model", "toy", "--draft", "toy:script:0,1", "--draft-tree", 12)
    found = json.loads(run(*words, "--draft-tokens", "3,7", "--json", *FLAGS).out)
    assert found["same"] and found["draft_tree"] == 12
    plain, *drafted = found["arms"]
    assert plain["stats"]["drafted"] == 0
    for arm in drafted:  # more candidates a round than its depth
        assert arm["stats"]["drafted"] > arm["draft_tokens"] * arm["stats"]["rounds"]
    assert "12 nodes, as deep as the drafts" in run(*words, *FLAGS).out


def test_ngram_needs_no_draft() -> None:
    found = run("compare", "--algorithm", "ngram", "--model", "toy", "--json", *FLAGS)
    assert json.loads(found.out)["layout"] == "looked-up tokens"


def test_the_draft_says_which_method_is_compared() -> None:
    for draft, layout in (("ngram", "looked-up tokens"), ("toy:oracle", "a row of logits a place")):
        found = run("compare", "--draft", draft, "--model", "toy", "--json", *FLAGS)
        assert json.loads(found.out)["layout"] == layout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--draft-tokens", "3,x"), "numbers such as 3,5,7"),
        (("--algorithm", "medusa"), "one of dflash"),
        (("--algorithm", "dflash2", "--draft", "none-such"), "selector"),
        (("--algorithm", "eagle3", "--draft", "toy:oracle"), "say --algorithm dflash"),
        (("--draft", "none"), "no draft to compare with"),
        (("--draft", "none", "--algorithm", "dflash"), "no draft to compare with"),
        (("--draft", "toy:oracle", "--algorithm", "ngram"), "say --algorithm dflash"),
        (("--draft-tree", 8, "--draft-p-min", 0.3), "--draft-p-min ends a path"),
        (("Once",), "give a prompt or --prompt"),
    ],
)
def test_bad_words_are_refused_before_loading(flags: tuple[str, ...], words: str) -> None:
    found = run("compare", "--model", "toy", *flags, *FLAGS)
    assert found.code == 2
    assert words in found.err


def test_the_prompt_may_stand_by_itself() -> None:
    words = ("compare", "--model", "toy", "--draft", "toy:oracle", "--draft-tokens", "3", "--json")
    by_flag, *others = [
        json.loads(run(*words, *more, *FLAGS[2:], typed="Once\n").out)
        for more in (("--prompt", "Once"), ("Once",), ("-",))
    ]
    for one in others:
        assert one["prompt_tokens"] == by_flag["prompt_tokens"]


def test_another_text_is_found_and_its_place_named() -> None:
    class Moody(ToyModel):
        """Says something else every time."""

        calls = 0

        def logits(self, state: Any) -> Any:
            Moody.calls += 1
            row = super().logits(state)
            return -row if Moody.calls > 60 else row

    pair = replace(ToyPair(Moody(words=False)), draft_name="toy:oracle", draft_block_size=4)
    with Engine(pair) as engine:
        found = compare(engine, Trial("Once", [3], {"max_tokens": 24}, runs=2, warmup=2))
    assert not found.same
    assert any(arm.first_divergence is not None for arm in found.arms)
    assert "deterministic: no: runs differ from each other with" in "\n".join(lines(found))


def test_divergence_is_the_first_place_that_differs() -> None:
    assert divergence([1, 2], [1, 2]) is None
    assert divergence([1, 2, 3], [1, 5, 3]) == 1
    assert divergence([1, 2], [1, 2, 3]) == 2


def test_heads_inside_the_target_need_no_draft_model() -> None:
    assert settle_algorithm("mtp", None) == settle_algorithm("mtp", "mtp") == ("mtp", "mtp", 0)
    assert settle_algorithm(None, "mtp") == ("mtp", "mtp", 0)
    with pytest.raises(ConfigError, match="say --algorithm mtp"):
        settle_algorithm("eagle3", "mtp")


def test_the_file_decides_what_a_draft_is(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("gguf")
    from tests.backends.gguf_files import DFLASH2, save_folder, save_sidecar
    from tests.backends.tiny import tiny_target, tiny_tokenizer
    from tests.backends.tiny_gguf import write_gguf

    target = write_gguf(tmp_path / "target.gguf", tiny_target("llama"), tiny_tokenizer())
    v1 = str(save_sidecar(tmp_path / "v1.gguf", target))
    v2 = str(save_sidecar(tmp_path / "v2.gguf", target, **DFLASH2))
    assert read_header(v2).own("selector_top_k") == 5
    assert settle_algorithm("dflash", v1) == (v1, "dflash", 0)
    assert settle_algorithm("dflash", v2) == settle_algorithm("dflash2", v2) == (v2, "dflash2", 5)
    folder = str(save_folder(tmp_path / "v2", **DFLASH2))
    assert settle_algorithm("dflash", folder) == (folder, "dflash2", 5)
    with pytest.raises(ConfigError, match="requires a draft with a selector"):
        settle_algorithm("dflash2", v1)
    with pytest.raises(ConfigError, match="say --algorithm dflash, or leave it out"):
        settle_algorithm("eagle3", v1)
    assert settle_algorithm(None, folder) == settle_algorithm("dflash", folder)
    for draft in (v1, v2, folder):  # a look-up that joins in does not change what a draft is
        assert settle_algorithm(None, f"{draft}+ngram")[1:] == settle_algorithm(None, draft)[1:]
    with pytest.raises(ConfigError, match="needs --draft-model"):
        settle_algorithm("dflash", None)
