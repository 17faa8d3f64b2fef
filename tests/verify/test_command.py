"""``dflash verify`` as a person runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash.verify.prompts import MIXED
from tests.cli.running import run

TOY = ("--model", "toy", "--draft", "toy:script:1,3,0", "--max-tokens", 16)


def test_a_lossless_pair_ends_with_zero_and_a_verdict() -> None:
    found = run("verify", *TOY)
    assert found.code == 0
    *lines, summary, verdict = found.out.splitlines()
    assert len(lines) == len(MIXED)
    assert all(line.startswith("identical") for line in lines)
    assert "0 ties, 0 real differences" in summary
    assert verdict == "verdict: lossless"


def test_json_has_the_promised_keys() -> None:
    found = json.loads(run("verify", *TOY, "--json").out)
    assert {"prompts", "identical", "ties", "real", "max_gap", "verdict"} <= set(found)
    assert (found["prompts"], found["identical"], found["verdict"]) == (12, 12, "lossless")
    assert found["committed"] > 1, "the whole block of the draft unless told otherwise"


def test_prompts_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "One?"}\n{"id": "two", "turns": ["Two?", "Three?"]}\n')
    found = run("verify", *TOY, "--prompts", file)
    assert [line.split()[1] for line in found.out.splitlines()[:2]] == ["mine:1", "two"]


@pytest.mark.parametrize("tree", ["8", "auto"])
def test_trees_are_verified_as_chains_are(tree: str) -> None:
    sampled = ("--sampling", "--samples", 300, "--seed", 5)
    found = json.loads(run("verify", *TOY, "--draft-tree", tree, "--json", *sampled).out)
    assert (found["identical"], found["verdict"]) == (12, "lossless")
    assert found["committed"] > 1
    assert [one["name"] for one in found["sampling"]] == ["seeded", "unseeded"]


@pytest.mark.parametrize("draft", ["ngram", "none"])
def test_a_tree_without_a_draft_that_grows_one_is_one_error(draft: str) -> None:
    words = ("--model", "toy", "--draft", draft, "--draft-tree", 8)
    for command in (("generate", "hello"), ("verify",), ("bench", "--no-costs")):
        found = run(*command, *words)
        assert found.code == 2
        assert (
            "is no draft" in found.err
            or "no other draft" in found.err
            or "no draft to" in found.err
        )


def test_real_differences_end_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash.backends.toy.ToyTarget.verify", believing)
    found = run("verify", *TOY)
    assert found.code == 1
    assert "DIFFERENT" in found.out
    assert found.out.splitlines()[-1] == "verdict: real differences"
    told = json.loads(run("verify", *TOY, "--json").out)
    assert told["real"] == 12 and told["differences"][0]["kind"] == "real"


def believing(self, proposal):  # type: ignore[no-untyped-def]
    """A target that takes drafts for its own choices."""
    from dflash.core.types import Verdict

    drafted = list(proposal.tokens)[: proposal.rows]
    self._base = len(self._tokens)
    rows = self._run([self._anchor, *drafted])
    own = int(self._model.logits(rows[-1]).argmax())
    self._last = [*drafted, own]
    return Verdict(list(self._last), range(len(drafted)), len(drafted), len(rows), rows)


def test_sampling_adds_both_rules_to_the_verdict() -> None:
    found = run("verify", *TOY, "--sampling", "--samples", 200, "--seed", 1, "--json")
    told = json.loads(found.out)
    assert found.code == 0
    assert told["verdict"] == "lossless"
    assert [audit["name"] for audit in told["sampling"]] == ["seeded", "unseeded"]
    assert all(audit["samples"] == 200 and audit["p"] > 0 for audit in told["sampling"])
    spoken = run("verify", *TOY, "--sampling", "--samples", 200, "--temperature", 0.5)
    assert "chi-square p =" in spoken.out
    assert "--seed" in spoken.err, "a seed was chosen, and said"


def test_samples_are_drawn_at_a_temperature_above_zero() -> None:
    found = run("verify", *TOY, "--sampling", "--samples", 20, "--seed", 1)
    assert "--temperature 1" in found.err, "chosen, and said"
    found = run("verify", *TOY, "--sampling", "--temperature", 0)
    assert (found.code, found.out) == (2, "")
    assert "at --temperature 0 there are none" in found.err


def test_without_a_draft_there_is_nothing_to_verify() -> None:
    for words in (("--draft", "none"), ()):
        found = run("verify", "--model", "toy", *words)
        assert found.code == 2
        assert "--draft" in found.err


def test_a_missing_prompt_file_says_so(tmp_path: Path) -> None:
    found = run("verify", *TOY, "--prompts", tmp_path / "none.jsonl")
    assert found.code == 2
    assert "none.jsonl" in found.err
