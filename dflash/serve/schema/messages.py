"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dflash.serve.schema.common import Sampling, StopString, Wire, unsupported


class Cached(Wire):
    """Blocks may say where a prompt should be cached; here every prompt is, so it is read over."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Cached):
    """Text."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = Field(None, max_length=0)


class ThinkingBlock(Wire):
    """What the model thought in an earlier turn."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class Caller(Wire):
    """Who made a call: the model itself."""

    type: Literal["direct"]


class ToolUseBlock(Cached):
    """A call the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Caller | None = None


class ToolResultBlock(Cached):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class Turn(Wire):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ClientTool(Cached):
    """A function the model may call."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Wire):
    """Whether a tool must be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Wire):
    """Whether to reason first, and how many tokens of it at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="Omitted: empty blocks. Nothing is summarized: the whole is sent."
    )


class Prompted(Wire):
    """What both routes take."""

    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CountRequest(Prompted):
    """How many tokens a prompt has."""


class MessagesRequest(Prompted, Sampling):
    """A conversation to be continued by the assistant."""

    max_tokens: int = Field(ge=0)
    stop_sequences: list[StopString] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    @property
    def shows_thinking(self) -> bool:
        """Whether the reasoning itself is sent."""
        return self.thinking is None or self.thinking.display != "omitted"

    def check(self) -> None:
        """Refuse what the API has and this server has not. Raises ApiError."""
        if self.thinking is not None and self.thinking.type != "enabled":
            unsupported("thinking.budget_tokens", self.thinking.budget_tokens)
        unsupported("service_tier", self.service_tier, ("auto", "standard_only"))
