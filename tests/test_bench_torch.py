"""The measurements on a small random target: transformers' arm, and the judge of ties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dflash  # noqa: E402 - after the check for torch
from bench import demo, gpu, identical, long_context, profile, vocabulary, walks, weights  # noqa: E402 - after the check for torch
from bench.arms import plain_transformers, transformers_arm  # noqa: E402
from bench.sets import Prompt  # noqa: E402
from dflash.backends.torch import pair as pair_module  # noqa: E402
from dflash.backends.torch.graph_check import open_graphs  # noqa: E402
from dflash.backends.torch.load import load_target  # noqa: E402
from dflash.bench import roofline  # noqa: E402
from dflash.train.evaluate import Score  # noqa: E402
from tests.backends.tape import Tape  # noqa: E402
from tests.backends.tiny import (  # noqa: E402
    reference_generate,
    save_target,
    tiny_target,
    tiny_tokenizer,
)
from tests.drafts.configs import CONV_AND_SELECTOR  # noqa: E402
from tests.facades.drafts import save_draft  # noqa: E402

pytestmark = pytest.mark.torch

PROMPT = [5, 77, 130, 9, 42]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tiny_target(), tiny_tokenizer(), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return plain_transformers(str(folder))


def test_the_transformers_arm_gives_the_greedy_ids_and_both_times(model: Any) -> None:
    run = transformers_arm(model, frozenset({0}))(PROMPT, 12)
    assert list(run.ids) == reference_generate(model, PROMPT, 12, eos={0})
    assert run.first == 1
    assert run.prefill > 0 and run.decode > 0
    assert run.rate == pytest.approx((len(run.ids) - 1) / run.decode)


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    draft = save_draft(tmp_path_factory.mktemp("draft"))
    return ["--target", str(folder), "--draft", str(draft), "--threads", "1"]


def test_the_speed_table_runs_from_end_to_end(pair: list[str], tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    short = [
        "--prompts-per-set",
        "1",
        "--tokens",
        "8",
        "--repeats",
        "2",
        "--sets",
        "gsm8k,mt_bench",
    ]
    demo.main([*pair, *short, "--blocks", "2,6,8", "--out", str(out)])
    written = json.loads(out.read_text())
    arms = [row["arm"] for row in written["sets"]["gsm8k"]["rows"]]
    assert arms == ["transformers", "plain", "block 2", "block 6"], "8 is past the native size"
    assert all(row["differ"] == 0 for row in written["sets"]["mt_bench"]["rows"])
    assert set(written["sets"]["gsm8k"]["decode_seconds"][0]) == set(arms)


def test_identity_runs_from_end_to_end(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--prompts", "6", "--tokens", "12", "--block-size", "6"]
    with pytest.raises(SystemExit) as ended:
        identical.main([*pair, *short, "--out", str(tmp_path / "identical.json")])
    assert ended.value.code == 0
    assert "0 real differences" in capsys.readouterr().out


def test_the_map_of_a_round_covers_all_of_it(
    pair: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for where, name in ((profile, "WIDE"), (roofline, "COPIED"), (roofline, "SIZE")):
        monkeypatch.setattr(where, name, 256)
    out = tmp_path / "profile.json"
    profile.main([*pair, "--rounds", "4", "--tokens", "32", "--block-size", "4", "--out", str(out)])
    found = json.loads(out.read_text())
    parts = {(part["phase"], part["part"]): part for part in found["parts"]}
    for part in (("verify", "head"), ("verify", "attention"), ("draft", "products")):
        assert parts[part]["ms"] > 0
    assert parts["verify", "head"]["bound_ms"] > 0
    whole = sum(part["ms"] for part in found["parts"])
    assert whole == pytest.approx(found["round_ms"]) and 0 < found["idle_share"] < 1
    assert 0 < found["quiet_idle_share"] < 1 and found["notes"]["operators"] > 100
    assert found["gaps"] is None or 0 < found["gaps"]["share"] < 1
    assert "no tensor kernel runs" in capsys.readouterr().out


@pytest.mark.parametrize("fill", [["text"], ["random"]])
def test_what_a_round_costs_is_told_by_context(
    fill: list[str], pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "long.json"
    short = ["--contexts", "40,80", "--rounds", "3", "--block-size", "4", "--fill", *fill]
    long_context.main([*pair, *short, "--out", str(out)])
    lines = json.loads(out.read_text())["lines"]
    assert [(line["context"], line["block"]) for line in lines] == [
        (40, 1),
        (40, 4),
        (80, 1),
        (80, 4),
    ]
    assert all(line["attention_ms"] > 0 for line in lines)
    assert "all but attention" in capsys.readouterr().out


def test_forms_of_weights_are_compared_on_the_same_texts(pair: list[str], tmp_path: Path) -> None:
    out = tmp_path / "weights.json"
    short = ["--tokens", "6", "--prompts-per-set", "1", "--repeats", "1", "--sets", "gsm8k"]
    weights.main([*pair, *short, "--forms", "int8", "--block-sizes", "4", "--out", str(out)])
    lines = json.loads(out.read_text())["lines"]
    assert [(line["form"], line["block"]) for line in lines] == [
        ("float32", 1),
        ("float32", 4),
        ("int8", 1),
        ("int8", 4),
    ]
    assert all(line["as_plain"] == line["texts"] == 1 for line in lines)


def test_a_target_made_on_the_spot_counts_and_its_draft_follows_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofline, "COPIED", 256)
    monkeypatch.setattr(roofline, "SIZE", 16)
    out = tmp_path / "gpu.json"
    where = ["--size", "tiny", "--device", "cpu", "--dtype", "float32", "--threads", "1"]
    gpu.main([*where, "--rounds", "2", "--context", "24", "--out", str(out)])
    lines = json.loads(out.read_text())["lines"]
    theirs = [1, 1, 1, 3, 5, 7, 13]  # over our layers, over its own, its DFlash by the scripts
    assert [line["committed"] for line in lines] == [1, 1, 3, 5, 7, 13, *theirs]
    assert lines[-1]["name"] == "transformers DFlash, block 16, 12 right"
    passes = json.loads(out.read_text())["ceilings"]["verify_ms"]
    assert list(passes) == ["1", "2", "4", "8", "16"] and all(ms > 0 for ms in passes.values())
    assert all(line["round_ms"] > 0 and line["efficiency"] > 0 for line in lines)
    monkeypatch.setattr(pair_module, "open_graphs", lambda *two: open_graphs(*two, Tape()))
    gpu.main([*where, "--rounds", "1", "--context", "24", "--out", str(out)])
    written = json.loads(out.read_text())
    assert [line["committed"] for line in written["lines"]] == [*[1, 1, 3, 5, 7, 13] * 2, *theirs]
    assert written["ceilings"]["cuda_graphs"] == "target and draft"


def test_walks_over_a_text_are_what_generation_accepts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nested = {"mask_token_id": 300, "target_layer_ids": [0, 2], **CONV_AND_SELECTOR}
    second = save_draft(
        tmp_path / "second", architectures=["DFlash2DraftModel"], is_causal=False,
        dflash_config=nested, block_size=8,
    )  # fmt: skip
    row = {"prompt": PROMPT, "text": reference_generate(tiny_target(), PROMPT, 40)}
    (tmp_path / "texts.json").write_text(json.dumps({"gsm8k": [row]}))
    out = tmp_path / "walks.json"
    walks.main(
        [
            *("--target", str(folder), "--drafts", str(second), "--paths", "walk,best,rows"),
            *("--texts", str(tmp_path / "texts.json"), "--threads", "1", "--out", str(out)),
        ]
    )
    found = json.loads(out.read_text())["walks"]
    lines = capsys.readouterr().out.splitlines()
    assert len(found) == len(lines) == 3
    assert "%" not in lines[0] and all("% [" in line for line in lines[1:])
    with dflash.load(str(folder), draft=str(second), device="cpu", profile=False) as engine:
        for path in ("walk", "best"):
            stats = engine.generate(PROMPT, max_tokens=40, block_size=8, draft_path=path).stats
            walked = found[f"{second} {path}"]["gsm8k"]
            assert (walked["rounds"], walked["committed"]) == (
                stats.rounds,
                stats.completion_tokens - 1,
            )
            assert walked["texts"] == [[walked["committed"], walked["rounds"]]]


def test_walks_of_shorter_blocks_are_what_generation_accepts_at_that_size(
    folder: Path, tmp_path: Path
) -> None:
    draft = save_draft(
        tmp_path / "draft", is_causal=False, block_size=8,
        dflash_config={"mask_token_id": 300, "target_layer_ids": [0, 2]},
    )  # fmt: skip
    row = {"prompt": PROMPT, "text": reference_generate(tiny_target(), PROMPT, 40)}
    (tmp_path / "texts.json").write_text(json.dumps({"gsm8k": [row]}))
    out = tmp_path / "walks.json"
    walks.main(
        [
            *("--target", str(folder), "--drafts", str(draft), "--block-sizes", "8,3"),
            *("--texts", str(tmp_path / "texts.json"), "--threads", "1", "--out", str(out)),
        ]
    )
    found = json.loads(out.read_text())["walks"]
    with dflash.load(str(folder), draft=str(draft), device="cpu", profile=False) as engine:
        for size in (8, 3):
            stats = engine.generate(PROMPT, max_tokens=40, block_size=size).stats
            assert found[f"{draft} walk block {size}"]["gsm8k"]["rounds"] == stats.rounds


def test_a_comparison_weighs_sets_alike_and_texts_by_their_passes() -> None:
    def texts(*counts: tuple[int, int]) -> list[Score]:
        return [Score(c / r, r, c, [c / r]) for c, r in counts]

    walked = {"a": texts((30, 10), (10, 10)), "b": texts((8, 4))}
    every = [("a", 0), ("a", 1), ("b", 0)]
    assert walks.average(walked, every) == (2.0 + 2.0) / 2
    assert walks.average(walked, every[:1]) == 3.0
    assert walks.total(walked["a"]).by_position == [(3 * 30 + 1 * 10) / 40]


def test_texts_made_side_by_side_are_each_prompts_own(folder: Path) -> None:
    target = load_target(str(folder), device="cpu", dtype="float32", pack=False)
    prompts = [Prompt(str(i), "made up", text) for i, text in enumerate(["hi", "how are you?"])]
    made = walks.plain(target, prompts, 12)
    model = tiny_target()
    for row in made:
        assert row["text"] == reference_generate(model, row["prompt"], 12, eos={0})
    assert len(made[0]["prompt"]) != len(made[1]["prompt"])


def test_a_draft_with_few_tokens_says_only_these_and_changes_no_text(
    pair: list[str], folder: Path, tmp_path: Path
) -> None:
    asks = {"role": "user", "content": "a b"}
    texts = [word * 5 for word in ("abc", "xyz", "hello world")]
    turns = [[asks, {"role": "assistant", "content": text}] for text in texts]
    data = tmp_path / "text.jsonl"
    data.write_text("\n".join(json.dumps({"messages": turn}) for turn in turns))
    few, asked = tmp_path / "few", ["--data", str(data), "--size", "6"]
    vocabulary.main([*pair, *asked, "--to", str(few)])
    options = {"max_tokens": 24, "ignore_eos": True, "reuse": False}
    with dflash.load(str(folder), str(few), profile=False) as engine:
        plain = engine.generate(PROMPT, block_size=1, **options)
        assert engine.generate(PROMPT, block_size=4, **options).token_ids == plain.token_ids
        loaded: Any = engine.pair
        ids = loaded.draft.tables.target_ids
        assert len(ids) == 6
        hidden = torch.randn(2, 64)
        head = load_target(str(folder), pack=False).head.weight[ids].bfloat16().float()
        torch.testing.assert_close(
            loaded.draft.tables.head(hidden).float(), hidden @ head.T, atol=0.1, rtol=0.02
        )
