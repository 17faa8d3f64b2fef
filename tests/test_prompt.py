"""From what a person hands over to ids, with a real template engine."""

from __future__ import annotations

import pytest

from dflash.errors import PromptError
from dflash.prompt import encode, render
from tests.backends.tiny import START, tiny_tokenizer

pytestmark = pytest.mark.torch


@pytest.fixture
def tokenizer():
    from dflash.hf_tokenizer import ModelTokenizer

    return ModelTokenizer(tiny_tokenizer())


def test_markers_of_the_template_become_their_tokens(tokenizer):
    ids = encode(tokenizer, "hi", system="be brief")
    assert ids.count(START) == 3
    assert ids[0] == START


def test_messages_and_text_render_alike(tokenizer):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert encode(tokenizer, messages) == encode(tokenizer, "hi", system="be brief")


def test_a_template_that_refuses_the_messages_is_quoted(tokenizer):
    tokenizer.inner.chat_template = (
        "{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}x"
    )
    assert render(tokenizer, [{"role": "user", "content": "hi"}]) == "x"
    with pytest.raises(PromptError, match="System role not supported"):
        encode(tokenizer, "hi", system="be brief")


def test_without_a_template_text_is_taken_as_it_is_and_messages_are_refused(tokenizer):
    tokenizer.inner.chat_template = None
    assert encode(tokenizer, "hi") == tokenizer.encode("hi")
    with pytest.raises(PromptError, match="no chat template"):
        encode(tokenizer, [{"role": "user", "content": "hi"}])


def test_plain_text_begins_as_the_tokenizer_begins_it(tokenizer):
    class Beginning:
        bos_token_id = START
        add_bos_token = True
        chat_template = None

        def encode(self, text):
            return tokenizer.encode(text)

    assert encode(Beginning(), "hi") == [START, *tokenizer.encode("hi")]


def test_text_that_leaves_no_token_is_an_empty_prompt(tokenizer):
    class Mute:
        chat_template = None

        def encode(self, text):
            return []

    with pytest.raises(PromptError, match="not one token"):
        encode(Mute(), "hi")
