"""From what a person hands over to token ids.

Text becomes one user turn of the target's chat template; messages go through the template as they
are; ids pass untouched. Without a template (or with ``chat_template=False``) text is encoded as it
stands, after the target's begin-of-text token where it has one.

Everything wrong with a prompt raises PromptError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from dflash.checks import switch
from dflash.config import token_ids
from dflash.errors import ConfigError, PromptError

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int] | Any  # Any: arrays and tensors of ids


ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def encode(
    tokenizer: Any, prompt: Prompt, *, chat_template: bool = True, system: str | None = None
) -> list[int]:
    """Ids [T] of ``prompt``. Raises PromptError when it is empty, or of no known form."""
    switch("chat_template", chat_template)
    if system is not None:
        insist_on_text(system, "the system message")
    if isinstance(prompt, str):
        insist_on_text(prompt)
        if not prompt.strip():
            raise PromptError("the prompt is empty: give some text")
        turns = [{"role": "user", "content": prompt}]
        text = render(tokenizer, turns, system) if chat_template else None
        ids = tokenizer.encode(text) if text is not None else _plain(tokenizer, prompt, system)
    elif _is_messages(prompt):
        text = render(tokenizer, prompt, system)
        if text is None:
            raise PromptError(
                "this target has no chat template, so it cannot take messages: give a text, or ids"
            )
        ids = tokenizer.encode(text)
    else:
        ids = _given_ids(prompt)
    if not ids:
        raise PromptError("the prompt is empty: not one token is left of it")
    return list(ids)


def insist_on_text(text: Any, what: str = "the prompt") -> None:
    """Raise PromptError for what is no string, or holds half a character.

    Python hands bytes that are not UTF-8 over as lone surrogates, which nothing can encode.
    """
    if not isinstance(text, str):
        raise PromptError(f"{what} must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PromptError(
            f"{what} is not UTF-8 text: convert it first (iconv -f latin1 -t utf-8)"
        ) from None


def render(
    tokenizer: Any, turns: Sequence[Message], system: str | None = None, **variables: Any
) -> str | None:
    """Messages through the target's chat template, up to where the answer begins.

    ``variables`` are handed to the template (tools, enable_thinking, ...). None = the target has no
    template. Raises PromptError when the template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [dict(turn) for turn in turns]
    for message in messages:
        insist_on_text(message["content"] or "", "a message")
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    if not any((message["content"] or "").strip() for message in messages):
        raise PromptError("the prompt is empty: no message has any text")
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **variables
        )
    except _template_errors() as problem:
        raise PromptError(f"the target's chat template refuses these messages: {problem}") from None
    return text


def _template_errors() -> tuple[type[Exception], ...]:
    """What a template may raise, over values of kinds that it does not expect, too."""
    plain = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
    try:
        from jinja2 import TemplateError
    except ImportError:  # not every backend brings a template engine
        return plain
    return (TemplateError, *plain)


def _plain(tokenizer: Any, text: str, system: str | None) -> list[int]:
    if system is not None:
        raise PromptError(
            "a system message needs a chat template, and this prompt goes without one: "
            "put it into the text"
        )
    begin = [tokenizer.bos_token_id] if _starts_with_bos(tokenizer) else []
    return [*begin, *tokenizer.encode(text)]


def _starts_with_bos(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "add_bos_token", False)) and (
        getattr(tokenizer, "bos_token_id", None) is not None
    )


def _is_messages(prompt: Any) -> TypeGuard[Sequence[Message]]:
    if not isinstance(prompt, Sequence) or not prompt:
        return False
    if not isinstance(prompt[0], Mapping):
        return False
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(f"a message needs 'role' and 'content'; found {message!r}")
        if message["role"] not in ROLES:
            raise PromptError(f"unknown role {message['role']!r}. Known: {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise PromptError(f"the content of a message must be text; found {message!r}")
    return True


def _given_ids(prompt: Any) -> Iterable[int]:
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(values, Mapping | bytes | bytearray | memoryview) or not isinstance(
        values, Iterable
    ):
        raise PromptError(f"a prompt is a text, messages or token ids, not {type(prompt).__name__}")
    rows = list(values)
    if rows and isinstance(rows[0], Sequence) and not isinstance(rows[0], str):
        if len(rows) > 1:
            raise PromptError(
                f"{len(rows)} prompts at once; one sequence is generated at a time: call once for "
                "each prompt"
            )
        rows = list(rows[0])
    try:
        return [i for row in rows for i in _one_id(row)]
    except ConfigError as problem:
        raise PromptError(f"the prompt's token ids are not usable: {problem}") from None


def _one_id(value: Any) -> tuple[int, ...]:
    ids = token_ids(value)
    if len(ids) != 1:
        raise ConfigError(f"expected one token id, got {value!r}")
    return ids
