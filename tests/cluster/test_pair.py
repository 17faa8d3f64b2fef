"""The pair is looked at before an engine is started, with the checks that loading has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash.cluster.pair import make_plan
from dflash.errors import CheckpointError, ConfigError, DownloadError, PairError
from tests.drafts.configs import config

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "eos_token_id": 1,
}


def folder(place: Path, content: dict[str, Any]) -> str:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return str(place)


@pytest.fixture
def target(tmp_path: Path) -> str:
    return folder(tmp_path / "target", TARGET)


def draft_of(tmp_path: Path, **changes: Any) -> str:
    return folder(tmp_path / "draft", config(**changes))


def test_a_fitting_pair_gets_its_native_block(target: str, tmp_path: Path) -> None:
    draft = draft_of(tmp_path)
    plan = make_plan(target, draft, None, port=9000)
    assert (plan.method, plan.draft, plan.block_size, plan.port) == ("dflash", draft, 8, 9000)
    assert plan.draft_tokens == 7
    assert plan.notes == ()


@pytest.mark.parametrize(
    ("asked", "got", "notes"), [(4, 4, 0), ("auto", 8, 1), (99, 8, 1), (None, 8, 0)]
)
def test_the_block_is_what_was_asked_for_up_to_the_native_size(
    target: str, tmp_path: Path, asked: Any, got: int, notes: int
) -> None:
    plan = make_plan(target, draft_of(tmp_path), asked)
    assert plan.block_size == got
    assert len(plan.notes) == notes
    assert plan.asked == asked


def test_the_default_block_of_the_draft_comes_before_the_native_one(
    target: str, tmp_path: Path
) -> None:
    draft = draft_of(tmp_path, nested={"default_block_size": 6})
    assert make_plan(target, draft, None).block_size == 6
    assert make_plan(target, draft, 3).block_size == 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target_hidden_size": 128}, "128"),
        ({"nested": {"target_layer_ids": [1, 9]}}, "9"),
        ({"vocab_size": 777}, "777"),
        ({"nested": {"mask_token_id": 1}}, "mask"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused(
    target: str, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(PairError, match=says):
        make_plan(target, draft_of(tmp_path, **changes), None)


def test_mixed_attention_is_noticed(target: str, tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    draft = draft_of(tmp_path, layer_types=kinds, sliding_window=64)
    assert make_plan(target, draft, None).mixed_attention


def test_no_draft_is_plain_decoding(target: str) -> None:
    for draft in (None, "none"):
        assert make_plan(target, draft, None).method is None


def test_target_and_draft_changed_places(target: str, tmp_path: Path) -> None:
    draft = draft_of(tmp_path)
    with pytest.raises(PairError, match="give it as --draft"):
        make_plan(draft, target, None)
    with pytest.raises((PairError, CheckpointError), match="target"):
        make_plan(target, target, None)


def test_what_is_not_there_is_said(target: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        make_plan(str(tmp_path / "gone"), None, None)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        make_plan(target, str(tmp_path / "gone"), None)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        make_plan(target, "owner/draft", None)


def test_look_up_drafts_stay_at_home(target: str) -> None:
    with pytest.raises(ConfigError, match="without --engine"):
        make_plan(target, "ngram", None)


def test_heads_of_the_target_need_heads_in_the_target(target: str, tmp_path: Path) -> None:
    with pytest.raises(PairError, match="num_nextn_predict_layers"):
        make_plan(target, "mtp", None)
    having = folder(tmp_path / "having", {**TARGET, "num_nextn_predict_layers": 1})
    plan = make_plan(having, "mtp", None)
    assert (plan.method, plan.draft, plan.block_size) == ("mtp", None, 2)
    assert make_plan(having, "mtp", 4).draft_tokens == 3


EAGLE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 512,
    "draft_vocab_size": 128,
    "hidden_act": "silu",
    # the usual three layers would be two in a target of four
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
}


def test_an_eagle_draft_has_three_drafted_tokens_unless_told(target: str, tmp_path: Path) -> None:
    draft = folder(tmp_path / "draft", EAGLE)
    plan = make_plan(target, draft, None)
    assert (plan.method, plan.draft_tokens) == ("eagle3", 3)
    assert make_plan(target, draft, 6).draft_tokens == 5


def test_an_eagle_draft_of_another_vocabulary_is_refused(target: str, tmp_path: Path) -> None:
    draft = folder(tmp_path / "draft", {**EAGLE, "vocab_size": 600})
    with pytest.raises(PairError, match="600"):
        make_plan(target, draft, None)
