"""``dflash compare`` on real pairs: the call people know, and the script beside it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer
from tests.cli.running import run
from tests.facades.drafts import save_draft

SCRIPT = Path(__file__).parents[2] / "examples" / "gguf_speculative.py"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny target and two sidecars."""
    pytest.importorskip("xllamacpp")
    from tests.backends.gguf_files import DFLASH2, save_sidecar
    from tests.backends.tiny_gguf import write_gguf

    folder = tmp_path_factory.mktemp("files")
    target = write_gguf(folder / "target.gguf", tiny_target("llama"), tiny_tokenizer())
    return {
        "target": target,
        "v1": save_sidecar(folder / "v1.gguf", target),
        "v2": save_sidecar(folder / "v2.gguf", target, **DFLASH2),
    }


def documented(files: dict[str, Path], algorithm: str, draft: str) -> tuple[Any, ...]:
    """The flags of the comparison script that people call today, with fewer tokens."""
    return (
        *("compare", "--algorithm", algorithm, "--model", files["target"]),
        *("--draft-model", files[draft], "--max-tokens", 24, "--runs", 3, "--warmup-tokens", 4),
        *("--n-ctx", 256, "--n-batch", 512, "--n-ubatch", 512, "--draft-tokens", 7),
        *("--draft-n-min", 0, "--draft-p-min", 0, "--temperature", 0, "--ignore-eos"),
    )


def test_the_call_that_people_know_runs_as_it_stands(files: dict[str, Path]) -> None:
    found = run(*documented(files, "dflash2", "v2"), "--threads", 1)
    assert found.code == 0, found.err
    for words in (
        *(
            "algorithm    dflash2, block size 6, lattice of 5 candidates a place",
            "deterministic: yes",
        ),
        *("selector     5 candidates", "rollbacks", "draft s  verify s", "speed-up", "match"),
        "kept at draft 1, 2, ... of 5",
    ):
        assert words in found.out, words


def test_every_flag_is_taken_and_the_arms_are_alike(files: dict[str, Path]) -> None:
    more = ("--prompt", "Once", "--seed", 3, "--cpu", "--draft-cpu", "--no-backend-sampling")
    found = run(
        *documented(files, "dflash", "v2"),
        *more,
        "--threads",
        1,
        "--temperature",
        0.8,
        "--verbose",
        "--json",
    )
    assert found.code == 0, found.err
    result = json.loads(found.out)
    assert result["algorithm"] == "dflash2", "it names itself for what the file is"
    assert result["backend"] == "gguf" and result["selector_top_k"] == 5 and result["same"]
    arm = result["arms"][1]
    assert arm["draft_tokens"] == 5 and len(arm["runs"]) == 3
    assert (
        arm["stats"]["completion_tokens"] == result["arms"][0]["stats"]["completion_tokens"] == 24
    )
    assert arm["stats"]["draft_seconds"] > 0 and arm["stats"]["verify_seconds"] > 0
    assert len(arm["stats"]["acceptance_by_position"]) == 5 and arm["rollbacks"] > 0


def test_a_v1_draft_is_no_dflash2_and_nothing_is_loaded_to_find_out(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pair was loaded")

    monkeypatch.setattr("dflash.engine.load", never)
    found = run(*documented(files, "dflash2", "v1"))
    assert found.code == 2 and "requires a draft with a selector" in found.err


def test_a_batch_that_cannot_hold_a_block_is_one_error(files: dict[str, Path]) -> None:
    found = run(*documented(files, "dflash", "v1"), "--n-batch", 5)  # the draft's own is of 6
    assert found.code == 2 and "--draft-tokens must not exceed --n-batch - 1" in found.err


def test_a_tree_where_none_can_be_judged_is_refused_before_anything_runs(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was run")

    monkeypatch.setattr("dflash.engine.Engine.stream", never)
    found = run(*documented(files, "dflash", "v1"), "--draft-tree", 8, "--threads", 1)
    assert found.code == 2 and "the gguf backend judges chains" in found.err
    assert "warming up" not in found.err


def test_a_pair_on_torch_is_compared_as_well(tmp_path: Path) -> None:
    target = save_target(tiny_target("llama"), tiny_tokenizer(), tmp_path / "target")
    draft = save_draft(tmp_path / "draft")
    few = ("--prompt", "Once", "--max-tokens", 12, "--warmup-tokens", 2, "--runs", 1)
    found = run(
        *("compare", "--model", target, "--draft", draft, "--algorithm", "dflash"),
        *(*few, "--draft-tokens", "2,3", "--cpu", "--json"),
    )
    assert found.code == 0, found.err
    result = json.loads(found.out)
    assert result["same"] and result["backend"] == "torch"
    assert [arm["draft_tokens"] for arm in result["arms"]] == [0, 2, 3]


def script(*words: object) -> None:
    """``python examples/gguf_speculative.py WORDS``, in this process."""
    spec = importlib.util.spec_from_file_location("gguf_speculative", SCRIPT)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    found.main([str(word) for word in words])


@pytest.mark.parametrize("draft", ["v1", "v2", "ngram"])
def test_the_script_says_the_same_text_both_ways(
    draft: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    script(files["target"], files.get(draft, draft), "--max-tokens", 12, "--runs", 1)
    said = capsys.readouterr().out
    assert "the texts are the same" in said and "tokens a verification" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("none.gguf", "v1"), r"error: .*none\.gguf.*"),
        (("target", "none.gguf"), r"error: .*none\.gguf.*"),
        (("target", "v1", "--draft-tokens", 0), "error: SpecConfig: draft_n_max must be .*"),
    ],
)
def test_what_the_script_cannot_run_is_one_sentence(
    words: tuple[Any, ...], says: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script(*(files.get(word, word) for word in words), "--max-tokens", 1, "--runs", 1)
    said = capsys.readouterr()
    assert ended.value.code == 2 and re.fullmatch(says, said.err.strip()), said.err
