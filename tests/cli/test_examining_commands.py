"""The commands that examine a pair, on MLX and on llama.cpp: a tiny target and a tiny draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer
from tests.cli.running import run
from tests.facades.drafts import save_draft

pytestmark = pytest.mark.torch


def mlx(folder: Path) -> tuple[Any, Any]:
    pytest.importorskip("mlx_lm")
    target = save_target(tiny_target("llama"), tiny_tokenizer(), folder / "target")
    return target, save_draft(folder / "draft")


def gguf(folder: Path) -> tuple[Any, Any]:
    pytest.importorskip("xllamacpp")
    from tests.backends.gguf_files import save_sidecar
    from tests.backends.tiny_gguf import write_gguf

    target = write_gguf(folder / "target.gguf", tiny_target("llama"), tiny_tokenizer())
    return target, save_sidecar(folder / "draft.gguf", target, block_size=6)


SETTINGS: dict[str, tuple[Any, ...]] = {
    "mlx": ("--draft-bits", 8),
    "gguf": ("--cache-type-k", "f32", "--cache-type-v", "f32", "--threads", 1),
}


@pytest.fixture(scope="module", params=[mlx, gguf], ids=lambda make: make.__name__)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, backend = tmp_path_factory.mktemp("pair"), request.param.__name__
    target, draft = request.param(folder)
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "One two."}\n{"prompt": "Three."}\n', encoding="utf-8")
    names = ("--model", target, "--draft", draft, "--backend", backend, "--json")
    return backend, (*names, "--prompts", prompts), names


def test_verify_says_that_the_draft_changes_nothing(pair: Any) -> None:
    backend, flags, _ = pair
    for more in ((), ("--temperature", 0.8, "--seed", 3)):
        found = run("verify", *flags, *SETTINGS[backend], "--max-tokens", 20, *more)
        assert found.code == 0, found.err
        assert json.loads(found.out)["verdict"] == "lossless"


def test_the_doctor_measures_acceptance_and_cost(pair: Any) -> None:
    found = run("doctor", *pair[1], "--max-tokens", 12)
    report = json.loads(found.out)
    assert (found.code, report["verdict"]) == (1, "broken")  # a random draft is never right
    assert report["acceptance"]["drafted"] > 0
    assert {block["block_size"] for block in report["cost"]} >= {1, 6}


def test_bench_recommends_a_block(pair: Any) -> None:
    backend, flags, _ = pair
    few = ("--max-tokens", 8, "--repeats", 1, "--warmup", 0, "--no-costs", "--block-sizes", "2,6")
    found = run("bench", *flags, *few)
    assert found.code == 0, found.err
    assert json.loads(found.out)["pair"]["backend"] == backend


def test_compare_finds_both_arms_alike(pair: Any) -> None:
    backend, _, flags = pair
    few = ("--prompt", "Once", "--max-tokens", 12, "--warmup-tokens", 2, "--runs", 1)
    found = run("compare", *flags, *few, "--draft-tokens", "3")
    assert found.code == 0, found.err
    result = json.loads(found.out)
    assert result["same"] and result["backend"] == backend
