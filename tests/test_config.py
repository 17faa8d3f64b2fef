"""What was asked, checked."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

from dflash import env
from dflash.checks import counted
from dflash.config import (
    GenerateConfig,
    GenerateOptions,
    LoadConfig,
    LoadOptions,
    draft_names,
    from_options,
    parse_block_size,
    parse_taps,
    token_ids,
)
from dflash.errors import ConfigError

BAD_GENERATE = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e-320}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"block_size": 0}, "block_size"),
    ({"block_size": -4}, "block_size"),
    ({"block_size": "big"}, "block_size"),
    ({"draft_tokens": -1}, "draft_tokens"),
    ({"block_size": 4, "draft_tokens": 3}, "give one of the two"),
    ({"stop": ("",)}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": ("a",)}, "token ids"),
    ({"stop_token_ids": 1.5}, "token ids"),
    ({"stop_token_ids": (-1,)}, "token ids"),
    ({"min_p": 1.5}, "min_p must be between 0 and 1"),
    ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
    ({"repetition_penalty": "much"}, "repetition_penalty"),
    ({"presence_penalty": float("inf")}, "presence_penalty"),
    ({"presence_penalty": -1e308}, "presence_penalty must be between"),
    ({"repetition_penalty": 1e-320}, "repetition_penalty"),
    ({"logit_bias": {3: 1e308}}, "logit_bias of token 3"),
    ({"frequency_penalty": None}, "frequency_penalty"),
    ({"no_repeat_ngram": -1}, "no_repeat_ngram"),
    ({"logit_bias": {"the": 1}}, "logit_bias must map"),
    ({"logit_bias": 5}, "logit_bias must map"),
    ({"logit_bias": {-1: 1}}, "logit_bias of token -1"),
    ({"logit_bias": {3: float("nan")}}, "logit_bias of token 3"),
    ({"bad_words": "word"}, "bad_words"),
    ({"bad_words": [[]]}, "bad_words"),
    ({"bad_words": [["word"]]}, "token ids"),
    ({"bad_words": [""]}, "bad_words: token ids"),
    ({"logit_bias": {1.5: 1}}, "logit_bias must map"),
    ({"max_tokens": np.bool_(True)}, "max_tokens"),
    ({"max_tokens": np.float32(3)}, "max_tokens"),
    ({"temperature": np.float32("nan")}, "temperature"),
    ({"temperature": Fraction(10**400)}, "temperature"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 300}, "must not be more"),
    ({"logits_processors": [5]}, "logits_processors"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 2.5}, "logprobs"),
    ({"n": 0}, "n must be"),
    ({"rule": "typical"}, "rule must be one of"),
    ({"rule": "block", "strict_mode": True}, "strict_mode is the match rule"),
    ({"json_schema": "{"}, "json_schema is not JSON"),
    ({"json_schema": 5}, "json_schema must be"),
    ({"json_schema": {}, "regex": "a"}, "held to one of them"),
    ({"grammar": " "}, "grammar must be text"),
    ({"regex": "a", "ignore_eos": True}, "leave out ignore_eos"),
]
BAD_LOAD = [
    ({"target": ""}, "target is empty"),
    ({"target": 5}, "target must be a path"),
    ({"draft": ""}, "draft is empty"),
    ({"dtype": "float8"}, "dtype must be"),
    ({"draft_dtype": "float16"}, "float16"),
    ({"backend": ""}, "backend"),
    ({"draft_sliding_window_size": 0}, "draft_sliding_window_size"),
    ({"draft_sliding_window_size": -5}, "draft_sliding_window_size"),
    ({"threads": 0}, "threads"),
    ({"threads": 513}, "threads must be at most 512, got 513"),
    ({"threads": 99999999999}, "threads must be at most 512"),
    ({"gguf": {"threads_batch": 513}}, "threads_batch must be at most 512"),
    ({"gguf": {"draft_threads": 2**40}}, "draft_threads must be at most 512"),
    ({"gguf": {"draft_threads_batch": 10**9}}, "draft_threads_batch must be at most 512"),
    ({"taps": "first"}, "taps"),
    ({"taps": (-1,)}, "taps"),
    ({"taps": ()}, "taps"),
    ({"taps": 3}, "taps"),
    ({"taps": (True,)}, "taps"),
    ({"gguf": 3}, "a mapping of its fields"),
    ({"gguf": {"draft_p_min": "half"}}, "draft_p_min"),
    ({"gguf": {"type_k": ["f16"]}}, "type_k"),
    ({"gguf": {"flash_attn": {}}}, "flash_attn"),
    ({"gguf": {"repack": 1}}, "repack"),
]


@pytest.mark.parametrize(("options", "words"), BAD_GENERATE)
def test_an_impossible_generation_setting_is_refused_by_name(options, words):
    with pytest.raises(ConfigError, match=words):
        GenerateConfig(**options)


@pytest.mark.parametrize(("options", "words"), BAD_LOAD)
def test_an_impossible_load_setting_is_refused_by_name(options, words):
    with pytest.raises(ConfigError, match=words):
        LoadConfig(**{"target": "x", **options})


def test_options_come_in_every_form_that_people_write():
    assert GenerateConfig(logit_bias={"7": -1, 3: 2}).logit_bias == ((3, 2.0), (7, -1.0))
    assert GenerateConfig(logit_bias=None).logit_bias == ()
    assert GenerateConfig(bad_words=[5, [6, 6, 7], np.array([8])]).bad_words == (
        (5,),
        (6, 6, 7),
        (8,),
    )
    assert [GenerateConfig(logprobs=x).logprobs for x in (None, False, True, 0, 5)] == [
        *(None, None, 0, 0, 5)
    ]
    assert GenerateConfig(logits_processors=print).logits_processors == (print,)
    for schema in ({"type": "object"}, '{"type": "object"}'):
        constraint = GenerateConfig(json_schema=schema).constraint
        assert constraint == ("json_schema", '{"type": "object"}')
    assert GenerateConfig(regex="a+").constraint == ("regex", "a+")
    assert GenerateConfig().constraint is None


def test_numbers_of_other_libraries_are_numbers():
    config = GenerateConfig(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        top_p=Fraction(1, 2),
        draft_tokens=np.uint8(2),
        logit_bias={np.int64(4): np.float16(2)},
    )
    assert (config.max_tokens, config.temperature, config.top_p) == (3, 0.5, 0.5)
    assert (config.block, config.logit_bias) == (3, ((4, 2.0),))
    found = (config.max_tokens, config.draft_tokens, config.temperature, config.top_p)
    assert [type(value) for value in found] == [int, int, float, float]  # JSON knows no others
    assert LoadConfig("toy", threads=np.int32(2)).threads == 2


def test_a_seed_or_strictness_selects_the_match_rule_and_a_name_any():
    assert GenerateConfig().acceptance == "rejection"
    assert GenerateConfig(seed=0).acceptance == GenerateConfig(strict_mode=True).acceptance
    assert GenerateConfig(seed=0).acceptance == "match"
    assert GenerateConfig(seed=0, rule="block").acceptance == "block"


def test_draft_tokens_are_the_block_without_its_anchor():
    assert GenerateConfig(draft_tokens=7).block == 8
    assert GenerateConfig(draft_tokens=0).block == 1
    assert GenerateConfig(block_size=5).block == 5
    assert GenerateConfig(block_size="auto").block == "auto"
    assert GenerateConfig().block is None


@pytest.mark.parametrize(
    "value", [7, [7], (7,), {7}, np.array(7), np.array([7]), np.array([[7]]), [7, 7], [[7]]]
)
def test_token_ids_come_in_every_form(value):
    assert token_ids(value) == (7,)


def test_no_token_ids_are_no_token_ids():
    assert token_ids(None) == () == token_ids([])


def test_a_single_stop_string_is_not_taken_for_its_letters():
    assert GenerateConfig(stop="END").stop == ("END",)
    assert GenerateConfig(stop=["a", "b", "a"]).stop == ("a", "b")


def test_names_are_normalised():
    config = LoadConfig(Path("some/where"), draft="none", dtype="torch.bfloat16", taps="1,8")
    assert config.target == str(Path("some/where"))
    assert config.draft is None
    assert config.dtype == "bfloat16"
    assert config.taps == (1, 8)
    assert LoadConfig("x", taps="auto").taps == "auto"
    assert LoadConfig("x", dtype="auto").dtype is None


def test_configs_are_frozen():
    with pytest.raises(AttributeError):
        GenerateConfig().max_tokens = 3  # type: ignore[misc]


def test_an_unknown_option_suggests_the_nearest_one():
    with pytest.raises(ConfigError, match="Did you mean 'max_tokens'"):
        from_options(GenerateConfig, {"max_token": 3})
    with pytest.raises(ConfigError, match="Known:"):
        from_options(GenerateConfig, {"zzz": 3})


def test_typed_keywords_are_the_fields_of_the_configs():
    assert set(get_type_hints(GenerateOptions)) == {f.name for f in fields(GenerateConfig)}
    names = {f.name for f in fields(LoadConfig)} - {"target", "draft"}
    assert set(get_type_hints(LoadOptions)) == names


def test_block_sizes_and_taps_are_read_from_text():
    assert parse_block_size("auto") == "auto"
    assert parse_block_size("12") == 12
    for text in ("0", "-1", "x", ""):
        with pytest.raises(ConfigError, match="--block-size"):
            parse_block_size(text)
    assert parse_taps("1, 8,15") == (1, 8, 15)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((LoadConfig, n) for n in ("force_dflash", "mtp", "profile", "pack_weights")),
        *((GenerateConfig, n) for n in ("ignore_eos", "echo", "strict_mode", "reuse")),
    ],
)
def test_a_switch_is_true_or_false_and_nothing_else(kind, name):
    needed = {"target": "toy"} if kind is LoadConfig else {}
    for value in ("yes", 1, None):
        with pytest.raises(ConfigError, match=f"{name} must be True or False"):
            kind(**needed, **{name: value})


def test_the_environment_gives_a_block_size(monkeypatch):
    monkeypatch.delenv("DFLASH_BLOCK_SIZE", raising=False)
    assert env.block_size() is None
    monkeypatch.setenv("DFLASH_BLOCK_SIZE", "12")
    assert env.block_size() == 12
    monkeypatch.setenv("DFLASH_BLOCK_SIZE", "auto")
    assert env.block_size() == "auto"
    for text in ("0", "twelve", "-3", "1.5"):
        monkeypatch.setenv("DFLASH_BLOCK_SIZE", text)
        with pytest.raises(ConfigError, match="DFLASH_BLOCK_SIZE"):
            env.block_size()


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "mine"))
    assert env.cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("DFLASH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / "dflash"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert env.cache_dir() == Path.home() / ".cache" / "dflash"


@pytest.mark.parametrize(("text", "on"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_flags_of_the_environment_are_typed(monkeypatch, text, on):
    monkeypatch.setenv("CI", text)
    monkeypatch.setenv("HF_HUB_OFFLINE", text)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    assert env.in_ci() is on
    assert env.offline() is on


def test_no_color_is_wanted_as_soon_as_it_is_set(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "0")
    assert env.no_color()
    monkeypatch.setenv("NO_COLOR", "")
    assert not env.no_color()


# --- names of drafts -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant", "drafts"),
    [
        (None, None, ()),
        ("none", None, ()),
        ("folder", "folder", ("folder",)),
        ("ngram", "ngram", ("ngram",)),
        ("none+ngram", "ngram", ("ngram",)),
        ("owner/draft+ngram", "owner/draft+ngram", ("ngram", "owner/draft")),
        ("./ngram", "./ngram", ("./ngram",)),
        ("toy:script:1,3+ngram", "toy:script:1,3+ngram", ("ngram", "toy:script:1,3")),
    ],
)
def test_a_drafts_name_may_have_ngram_in_it(given, meant, drafts):
    config = LoadConfig("target", given)
    assert config.draft == meant
    assert draft_names(config.draft) == drafts


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("+ngram", "look-up alone"),
        ("ngram+ngram", "look-up alone"),
        ("ngram+owner/draft", r"names the look-up first: write owner/draft\+ngram"),
    ],
)
def test_a_look_up_beside_nothing_and_one_that_is_named_first_are_refused(draft, words):
    with pytest.raises(ConfigError, match=words):
        LoadConfig("target", draft)


# --- the simple rule -----------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [-0.1, 1.1, "0.3", True, float("nan")])
def test_a_least_acceptance_rate_is_a_share(rate):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        GenerateConfig(min_acceptance_rate=rate)


def test_a_least_acceptance_rate_is_for_fixed_blocks():
    with pytest.raises(ConfigError, match="fixed block"):
        GenerateConfig(min_acceptance_rate=0.3, block_size="auto")
    assert GenerateConfig(min_acceptance_rate=0.3).block == 5
    assert GenerateConfig(min_acceptance_rate=0.3, block_size=3).block == 3
    assert GenerateConfig(min_acceptance_rate=0.3, draft_tokens=6).block == 7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft_path": "viterbi"}, "walk, best"),
        ({"draft_p_min": -0.1}, "draft_p_min"),
        ({"draft_p_min": 1.5}, "draft_p_min"),
        ({"draft_path": "best", "draft_p_min": 0.2}, "give one of the two"),
    ],
)
def test_how_drafts_choose_is_checked(options, words):
    with pytest.raises(ConfigError, match=words):
        GenerateConfig(**options)


def test_number_words_agree():
    assert [counted(n, "answer") for n in (0, 1, 2)] == ["0 answers", "1 answer", "2 answers"]
    assert counted(1, "pass", "passes") == "1 pass"
    assert counted(3, "pass", "passes") == "3 passes"
