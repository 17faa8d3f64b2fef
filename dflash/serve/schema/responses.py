"""``POST /v1/responses``, stateless: each request carries its whole conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dflash.serve.config import MOST_LOGPROBS
from dflash.serve.schema.chat import Effort
from dflash.serve.schema.common import Sampling, StopString, Wire, unsupported


class ContentPart(Wire):
    """A piece of text in a message."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(Wire):
    """A turn."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Wire):
    """A call the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class OutputItem(Wire):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ContentPart]
    id: str | None = None
    status: str | None = None


class ReasoningText(Wire):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Wire):
    """What the model thought in an earlier turn."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: None = None
    status: str | None = None


Item = MessageItem | CallItem | OutputItem | ReasoningItem


class FunctionTool(Wire):
    """A function the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class NamedChoice(Wire):
    """The one function that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Wire):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Wire):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Wire):
    """How much to reason first."""

    effort: Effort | None = None
    summary: str | None = None


class ResponsesRequest(Sampling):
    """A conversation to be continued by the assistant."""

    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=0)
    stop: StopString | list[StopString] | None = None
    stream: bool | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    # identifiers that change no answer
    metadata: dict[str, str] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    # fields of the API that are refused unless they ask for nothing
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    truncation: str | None = None
    service_tier: str | None = None

    def check(self) -> None:
        """Refuse what the API has and this server has not. Raises ApiError."""
        unsupported("store", self.store, (False,))
        unsupported("background", self.background, (False,))
        unsupported("previous_response_id", self.previous_response_id)
        unsupported("truncation", self.truncation, ("disabled",))
        unsupported("service_tier", self.service_tier, ("auto", "default"))
        if self.text is not None:
            unsupported("text.verbosity", self.text.verbosity, ("medium",))
            form = self.text.format
            if form is not None and form.type != "json_schema":
                unsupported("text.format.schema", form.schema_)
        if self.reasoning is not None:
            unsupported("reasoning.summary", self.reasoning.summary)
