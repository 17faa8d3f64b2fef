"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dflash.serve.config import MOST_LOGPROBS
from dflash.serve.errors import ApiError
from dflash.serve.schema.common import (
    Sampling,
    Several,
    StreamOptions,
    StructuredOutputs,
    Wire,
    only_with,
    unsupported,
)


class TextPart(Wire):
    """A part of a message; text is the only kind these models read."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Wire):
    """Which function, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Wire):
    """A call that the model made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Wire):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None


class Function(Wire):
    """A function the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class NamedFunction(Wire):
    """The name alone."""

    name: str


class NamedTool(Wire):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class PlainFormat(Wire):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(Wire):
    """A JSON schema with a name."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(Wire):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(Sampling, Several):
    """A conversation to be continued by the assistant."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=0)
    max_completion_tokens: int | None = Field(None, ge=0)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    response_format: PlainFormat | SchemaFormat | None = Field(None, discriminator="type")
    structured_outputs: StructuredOutputs | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True
    # identifiers that change no answer
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    # fields of the API that are refused unless they ask for nothing
    store: bool | None = None
    service_tier: str | None = None
    modalities: list[str] | None = None

    def check(self) -> None:
        """Refuse what the API has and this server has not, and contradictions. Raises ApiError."""
        only_with("stream_options", self.stream_options, "stream", self.stream)
        only_with("top_logprobs", self.top_logprobs, "logprobs", self.logprobs)
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens differ: give one of the two")
        unsupported("store", self.store, (False,))
        unsupported("service_tier", self.service_tier, ("auto", "default"))
        unsupported("modalities", self.modalities, (["text"],))
