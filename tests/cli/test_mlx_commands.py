"""The commands that examine a pair, on MLX: a tiny target and a tiny draft."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("mlx_lm")
pytest.importorskip("torch")

from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer
from tests.cli.running import run
from tests.facades.drafts import save_draft

pytestmark = [pytest.mark.mlx, pytest.mark.torch]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    folder = tmp_path_factory.mktemp("pair")
    target = save_target(tiny_target("llama"), tiny_tokenizer(), folder / "target")
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "One two."}\n{"prompt": "Three."}\n', encoding="utf-8")
    names = ("--model", target, "--draft", save_draft(folder / "draft"), "--backend", "mlx")
    return (*names, "--json"), ("--prompts", prompts)


def test_verify_says_that_the_draft_changes_nothing(pair: Any) -> None:
    flags, prompts = pair
    for more in ((), ("--temperature", 0.8, "--seed", 3)):
        found = run("verify", *flags, *prompts, "--max-tokens", 20, "--draft-bits", 8, *more)
        assert found.code == 0, found.err
        assert json.loads(found.out)["verdict"] == "lossless"


def test_the_doctor_measures_acceptance_and_cost(pair: Any) -> None:
    flags, prompts = pair
    found = run("doctor", *flags, *prompts, "--max-tokens", 12)
    report = json.loads(found.out)
    assert (found.code, report["verdict"]) == (1, "broken")  # a random draft is never right
    assert report["acceptance"]["drafted"] > 0
    assert {block["block_size"] for block in report["cost"]} >= {1, 6}


def test_bench_recommends_a_block(pair: Any) -> None:
    flags, prompts = pair
    few = ("--max-tokens", 8, "--repeats", 1, "--warmup", 0, "--no-costs", "--block-sizes", "2,6")
    found = run("bench", *flags, *prompts, *few)
    assert found.code == 0, found.err
    assert json.loads(found.out)["pair"]["backend"] == "mlx"


def test_compare_finds_both_arms_alike(pair: Any) -> None:
    flags, _ = pair
    few = ("--prompt", "Once", "--max-tokens", 12, "--warmup-tokens", 2, "--runs", 1)
    found = run("compare", *flags, *few, "--draft-tokens", "3")
    assert found.code == 0, found.err
    result = json.loads(found.out)
    assert result["same"] and result["backend"] == "mlx"
