"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from dflash.serve.schema.chat import Message, Tool
from dflash.serve.schema.common import Token, Wire


class TokenizeRequest(Wire):
    """A text as it stands, or messages through the chat template; one of the two."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Begin-of-text before a prompt, unless false; templates bring their own."
    )
    return_token_strs: bool = False


class DetokenizeRequest(Wire):
    """Token ids."""

    model: str | None = None
    tokens: list[Token]
