"""Upstream's MLX calls, word for word, on a tiny pair."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx_lm")
pytest.importorskip("torch")

import mlx.core as mx

from dflash.errors import CheckpointError, ConfigError
from dflash.model_mlx import DFlashDraftModel, load, load_draft, stream_generate
from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer
from tests.facades.drafts import MASK, NATIVE, save_draft

pytestmark = [pytest.mark.mlx, pytest.mark.torch]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    base = tmp_path_factory.mktemp("pair")
    target = save_target(tiny_target("llama"), tiny_tokenizer(), base / "target")
    return str(target), str(save_draft(base / "draft"))


@pytest.fixture(scope="module")
def pair(folders: tuple[str, str]) -> Any:
    return load(folders[0])


@pytest.fixture
def draft(folders: tuple[str, str]) -> DFlashDraftModel:
    return load_draft(folders[1])


def ids(responses: Any) -> list[int]:
    return [token for response in responses for token in response.tokens]


def test_load_is_a_pair_and_has_names(pair: Any) -> None:
    model, tokenizer = pair
    assert (pair.model, pair.tokenizer) == (model, tokenizer)
    assert tokenizer.encode("a")


def test_every_form_of_a_call_gives_the_text_of_mlx_lm(pair: Any, draft: Any) -> None:
    from mlx_lm.generate import generate_step

    model, tokenizer = pair
    prompt = tokenizer.encode("Why is the sky blue?", add_special_tokens=False)
    plain = [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=24)]
    ends = [i for i, token in enumerate(plain) if token in tokenizer.eos_token_ids]
    wanted = plain[: ends[0] + 1] if ends else plain
    forms: list[Any] = ["Why is the sky blue?", prompt, mx.array(prompt)]
    for form in forms:
        assert ids(stream_generate(model, draft, tokenizer, form, 4, 24)) == wanted
    by_name = {"model": pair, "draft": draft, "tokenizer": tokenizer, "prompt": prompt}
    assert ids(stream_generate(**by_name, max_tokens=24, temperature=0.0)) == wanted
    greedy = stream_generate(**by_name, max_tokens=24, sampler=lambda p: mx.argmax(p, axis=-1))
    assert ids(greedy) == wanted


def test_messages_go_through_the_template_only_where_the_caller_sends_them(
    pair: Any, draft: Any
) -> None:
    model, tokenizer = pair
    messages = [{"role": "user", "content": "hi"}]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    wanted = tokenizer.encode("<user>hi<assistant>", add_special_tokens=False)
    for one in (tokenizer, tokenizer._tokenizer):  # mlx-lm's gives ids, transformers' a mapping
        prompt = one.apply_chat_template(
            messages, add_generation_prompt=True, chat_template=template
        )
        first = next(stream_generate(model, draft, tokenizer, prompt, max_tokens=2))
        assert first.prompt_tokens == len(wanted)
    bare = next(stream_generate(model, draft, tokenizer, "hi", max_tokens=2))
    assert bare.prompt_tokens == 2


def test_responses_have_upstreams_fields(pair: Any, draft: Any) -> None:
    model, tokenizer = pair
    found = list(stream_generate(model, draft, tokenizer, [5, 9, 33], block_size=4, max_tokens=9))
    first, last = found[0], found[-1]
    assert first.accepted is None
    assert all(one.accepted == len(one.tokens) for one in found[1:])  # upstream's counting
    assert first.prompt_tokens == 3
    assert last.generation_tokens == len(ids(found)) <= 9
    assert [r.finish_reason for r in found[:-1]] == [None] * (len(found) - 1)
    assert last.finish_reason in ("length", "stop")
    assert last.prompt_tps > 0
    assert last.peak_memory >= 0


def test_a_seed_of_mlx_repeats_a_sampled_text(pair: Any, draft: Any) -> None:
    model, tokenizer = pair
    texts = []
    for seed in (3, 3, 4):
        mx.random.seed(seed)
        texts.append(ids(stream_generate(model, draft, tokenizer, [5, 9], 4, 24, temperature=1.5)))
    assert texts[0] == texts[1] != texts[2]


def test_the_drafts_config_is_readable(draft: Any, folders: tuple[str, str]) -> None:
    config = draft.config
    assert (config.block_size, config.mask_token_id) == (NATIVE, MASK)
    assert config.target_layer_ids == (0, 2)
    assert config.sliding_window_size is None
    assert (
        load_draft(draft_id=folders[1], sliding_window_size=8192).config.sliding_window_size == 8192
    )


def test_a_window_bounds_the_drafts_caches(folders: tuple[str, str], pair: Any) -> None:
    bounded = load_draft(folders[1], sliding_window_size=3)
    assert [cache.bound for cache in bounded.bind(pair.model).make_cache()] == [3, 3]
    model, tokenizer = pair
    assert len(ids(stream_generate(model, bounded, tokenizer, [5, 9, 8, 7, 6], 4, 12))) <= 12


@pytest.mark.parametrize("window", [0, -4])
def test_a_window_that_is_none_is_a_value_error(folders: tuple[str, str], window: int) -> None:
    with pytest.raises(ValueError, match="draft_sliding_window_size"):
        load_draft(folders[1], sliding_window_size=window)


def test_a_larger_block_is_clamped_with_one_line(pair: Any, draft: Any) -> None:
    model, tokenizer = pair
    with pytest.warns(UserWarning, match="block size 99"):
        found = list(stream_generate(model, draft, tokenizer, [5, 9], block_size=99, max_tokens=9))
    assert max(len(response.tokens) for response in found) <= NATIVE


def test_what_cannot_be_is_said(pair: Any, draft: Any, tmp_path: Path) -> None:
    model, tokenizer = pair
    with pytest.raises(ConfigError, match="not both"):
        stream_generate(model, draft, tokenizer, [5], temperature=1.0, sampler=lambda p: p)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_draft(str(tmp_path))


@pytest.mark.parametrize("value", [b"ab", type(tiny_tokenizer()), SimpleNamespace(decode=len)])
def test_what_merely_has_a_decode_is_no_tokenizer(pair: Any, draft: Any, value: Any) -> None:
    with pytest.raises(ConfigError, match="tokenizer must be what load returns"):
        stream_generate(pair.model, draft, value, [5, 9])
