"""``POST /tokenize`` and ``POST /detokenize``: what the target makes of text, and back."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from dflash.errors import PromptError
from dflash.serve.conversation import Conversation, Tools
from dflash.serve.errors import ApiError, as_api_error
from dflash.serve.routes.chat import functions_of, message_of
from dflash.serve.routes.shared import Served, check_model
from dflash.serve.schema.tokens import DetokenizeRequest, TokenizeRequest
from dflash.serve.server import Server

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, server: Served) -> dict[str, Any]:
    """The ids that a request with this prompt, or these messages, would run."""
    check_model(server, body.model)
    ids: list[int] = await server.prepare(_ids, body, server)
    found = {
        "count": len(ids),
        "max_model_len": server.engine.pair.context_length,
        "tokens": ids,
    }
    if body.return_token_strs:
        found["token_strs"] = [server.spelling.text_of(token) for token in ids]
    return found


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, server: Served) -> dict[str, str]:
    """The text of ids; special tokens print nothing."""
    check_model(server, body.model)
    size = server.engine.pair.vocab_size
    if any(not 0 <= token < size for token in body.tokens):
        raise ApiError(400, f"token ids are below {size}", param="tokens")
    return {"prompt": await server.prepare(server.engine.pair.tokenizer.decode, body.tokens)}


def _ids(body: TokenizeRequest, server: Server) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give a prompt or messages, one of the two", param="prompt")
    if body.messages is None and (body.tools or body.chat_template_kwargs):
        raise ApiError(400, "tools and chat_template_kwargs are for messages", param="prompt")
    if body.messages is not None and body.add_special_tokens:
        raise ApiError(400, "add_special_tokens is for a prompt", param="add_special_tokens")
    tokenizer = server.engine.pair.tokenizer
    try:
        if body.messages is not None:
            messages = [message_of(message) for message in body.messages]
            tools = Tools(functions_of(body.tools))
            variables = body.chat_template_kwargs or {}
            return Conversation(messages, tools, variables).understood(tokenizer).ids
        if not body.prompt:
            return []
        if body.add_special_tokens is False:
            return list(tokenizer.encode(body.prompt))
        return server.engine.encode(body.prompt, chat_template=False)
    except PromptError as problem:
        raise as_api_error(problem) from problem
