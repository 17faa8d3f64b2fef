from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dflash.doctor.static import CHECKS, Choice, TargetFacts, check_pair, insist
from dflash.doctor.static.name import tokenizer_digest
from dflash.doctor.static.template import template_digest
from dflash.drafts.spec import read_spec
from dflash.errors import PairError
from tests.drafts.configs import config

TARGET = TargetFacts(
    name="owner/Tiny-Target",
    hidden_size=64,
    num_layers=4,
    embedding_rows=512,
    tokenizer_size=500,
    eos_ids=frozenset({0, 7}),
    pad_id=5,
)
CHOICE = Choice("owner/Tiny-Draft")


def found(
    draft: dict[str, Any] | None = None,
    target: dict[str, Any] | None = None,
    choice: dict[str, Any] | None = None,
) -> list[tuple[str, str]]:
    spec = read_spec(config(**(draft or {})))
    facts, asked = replace(TARGET, **(target or {})), replace(CHOICE, **(choice or {}))
    return [(f.level, f.check) for f in check_pair(spec, facts, asked)]


def test_a_fitting_pair_has_no_findings() -> None:
    assert found() == []
    assert len(CHECKS) == 8


@pytest.mark.parametrize(
    ("draft", "target", "wanted"),
    [
        ({}, {"hidden_size": 128}, ("error", "width")),
        ({"target_hidden_size": 32}, {}, ("error", "width")),
        ({}, {"num_layers": 2}, ("error", "depth")),
        ({"num_target_layers": 9}, {}, ("error", "depth")),
        ({"vocab_size": 256}, {}, ("error", "vocabulary")),
        ({"draft_vocab_size": 513}, {}, ("error", "vocabulary")),
        ({"nested": {"mask_token_id": 512}}, {}, ("error", "mask")),
        ({"nested": {"mask_token_id": 7}}, {}, ("error", "mask")),
        ({"nested": {"mask_token_id": 5}}, {}, ("warning", "mask")),
        ({"dtype": "float16"}, {}, ("warning", "dtype")),
        ({"torch_dtype": "torch.float16"}, {}, ("warning", "dtype")),
        ({"nested": {"default_block_size": 9}}, {}, ("warning", "block")),
        ({"target_name": "owner/Other"}, {}, ("warning", "name")),
    ],
)
def test_each_misfit_is_found_once(
    draft: dict[str, Any], target: dict[str, Any], wanted: tuple[str, str]
) -> None:
    assert found(draft, target) == [wanted]


@pytest.mark.parametrize(
    "draft",
    [
        {"num_target_layers": None},
        {"num_target_layers": 2},  # some trainers record the number of taps there
        {"vocab_size": 500},
        {"nested": {"mask_token_id": 511}},  # a padding row
        {"dtype": "bfloat16"},
        {"nested": {"default_block_size": 8}},
    ],
)
def test_what_is_allowed_passes(draft: dict[str, Any]) -> None:
    assert found(draft) == []


def test_padding_that_also_ends_is_an_error_once() -> None:
    assert found({"nested": {"mask_token_id": 5}}, {"eos_ids": frozenset({5})}) == [
        ("error", "mask")
    ]


def test_float16_is_an_error() -> None:
    assert found(choice={"dtype": "float16"}) == [("error", "dtype")]


def test_a_history_shorter_than_trained_is_a_warning() -> None:
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}
    assert found(sliding, choice={"window": 15}) == [("warning", "block")]
    assert found(sliding, choice={"window": 16}) == []
    assert found(choice={"window": 4000}) == [("warning", "block")]


@pytest.mark.parametrize(
    "name",
    [
        "owner/tiny-target",
        "other/Tiny_Target-GGUF",
        "./models/anything",
        "/models/anything",
        "C:\\models\\anything",
        "anything.gguf",
    ],
)
def test_alike_names_and_local_paths_are_no_mismatch(name: str) -> None:
    assert found({"target_name": "owner/Tiny-Target"}, {"name": name}) == []


def test_a_recorded_tokenizer_decides_whatever_the_names_say() -> None:
    ours = tokenizer_digest({"a": 0, "b": 1})
    assert ours == tokenizer_digest({"b": 1, "a": 0})
    theirs = tokenizer_digest({"a": 1, "b": 0})
    draft = {"target_tokenizer_sha256": ours, "target_name": "owner/Other"}
    assert found(draft, {"tokenizer_digest": ours}) == []
    assert found(draft, {"tokenizer_digest": theirs}) == [("error", "name")]


def test_all_errors_come_at_once_and_name_both_sides() -> None:
    spec = read_spec(config(vocab_size=256, num_target_layers=9))
    target = replace(TARGET, hidden_size=128)
    with pytest.raises(PairError) as caught:
        insist(check_pair(spec, target, CHOICE), target, CHOICE)
    message = str(caught.value)
    for part in ("owner/Tiny-Draft", "owner/Tiny-Target", "64", "128", "256", "512", "9 layers"):
        assert part in message
    assert message.count("\n  - ") == 3


def test_warnings_are_handed_back() -> None:
    spec = read_spec(config(nested={"mask_token_id": 5}))
    (warning,) = insist(check_pair(spec, TARGET, CHOICE), TARGET, CHOICE)
    assert "padding token" in warning


def test_a_recorded_chat_template_should_be_the_targets() -> None:
    ours, theirs = template_digest("{{ messages }}\n"), template_digest("other")
    assert ours == template_digest("{{ messages }}"), "white space at the ends says nothing"
    assert template_digest(None) is None and template_digest({"default": "x"}) is None
    draft = {"chat_template_sha256": ours}
    assert found(draft, {"template_digest": ours}) == []
    assert found(draft, {"template_digest": theirs}) == [("warning", "template")]
    assert found(draft, {"template_digest": None}) == [("warning", "template")]
    assert found({}, {"template_digest": theirs}) == [], "a draft that recorded none"
    unknown = {"template_digest": None, "tokenizer_size": None}
    assert found(draft, unknown) == [], "a model that came without its tokenizer"


def test_a_refusal_carries_its_findings() -> None:
    spec = read_spec(config(vocab_size=256))
    with pytest.raises(PairError) as caught:
        insist(check_pair(spec, TARGET, CHOICE), TARGET, CHOICE)
    assert [finding.check for finding in caught.value.findings] == ["vocabulary"]
