"""From messages and tools to the prompt's ids, and how the answer is to be read.

Messages arrive here in the form that chat templates expect (role, content as text, tool_calls with
arguments as objects), whichever API they came by.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from dflash.prompt import render
from dflash.serve.calls import FORCED, HERMES, Family, described, family_of, forced_schema, thinks
from dflash.serve.errors import ApiError
from dflash.serve.splitter import Splitter
from dflash.serve.strict import Strict
from dflash.thinking import BEGIN


@dataclass(frozen=True)
class Tools:
    """Functions offered, and whether one must be called."""

    functions: Sequence[Mapping[str, Any]] = ()  # name, description, parameters
    choice: Literal["none", "auto", "required"] = "auto"
    named: str | None = None  # the one that must be called
    most_calls: int | None = None
    strict: Collection[str] = ()  # names of those whose calls must fit their schema

    def __post_init__(self) -> None:
        """Raises ApiError for a choice that names nothing."""
        if self.named is not None and self.named not in self.offered:
            raise ApiError(
                400, f"tool_choice names {self.named!r}, not among the tools", param="tool_choice"
            )
        if self.choice == "required" and not self.functions:
            raise ApiError(400, "tool_choice needs tools to choose from", param="tool_choice")

    @property
    def offered(self) -> dict[str, Any]:
        """Name to the schema of its parameters."""
        return {one["name"]: one.get("parameters") for one in self.functions}

    @property
    def active(self) -> bool:
        """Whether the model is told of tools at all."""
        return bool(self.functions) and (self.choice != "none" or self.named is not None)

    @property
    def forced(self) -> list[str]:
        """The names of which one must be called; [] = none must."""
        if self.named is not None:
            return [self.named]
        return list(self.offered) if self.choice == "required" else []


@dataclass(frozen=True)
class Conversation:
    """What is said so far, and how the next turn is to be written."""

    messages: Sequence[Mapping[str, Any]]
    tools: Tools = field(default_factory=Tools)
    variables: Mapping[str, Any] = field(default_factory=dict)  # for the template
    held: Mapping[str, Any] = field(default_factory=dict)  # json_schema, regex or grammar
    effort: str | None = None  # how much reasoning; "none" = none, "on" = as the template has it

    def understood(self, tokenizer: Any) -> Understood:
        """Ids and reading. Raises ApiError or PromptError."""
        template = template_of(tokenizer)
        held = dict(self.held)
        if self.tools.forced:
            if held:
                raise ApiError(400, "response_format and a forced tool call exclude each other")
            held = {"json_schema": forced_schema(self.tools.offered, self.tools.forced)}
        text = render(tokenizer, *self._shown(template), **self._variables(tokenizer, template))
        assert text is not None, "there is a template"
        inside = text.rstrip().endswith(BEGIN)
        if held and inside:
            raise ApiError(
                400,
                "this template begins every answer with reasoning, which no form can hold: turn "
                'reasoning off (chat_template_kwargs {"enable_thinking": false}) for a held text',
            )
        split = partial(
            Splitter,
            think=not held and thinks(template),
            inside=inside,
            family=self._family(template),
            offered=self.tools.offered,
            most_calls=self.tools.most_calls,
            fits=Strict({name: self.tools.offered[name] for name in self.tools.strict}).fits,
        )
        return Understood(tokenizer.encode(text), held, split)

    def _family(self, template: str) -> Family | None:
        if not self.tools.active:
            return None
        return FORCED if self.tools.forced else family_of(template) or HERMES

    def _shown(self, template: str) -> tuple[list[dict[str, Any]], str | None]:
        """The messages; and a system message with the tools where the template shows none."""
        messages = [dict(message) for message in self.messages]
        if not self.tools.active or family_of(template) is not None:
            return messages, None
        offer = described(self.tools.functions)
        if messages and messages[0]["role"] == "system":
            messages[0]["content"] = f"{messages[0]['content'] or ''}\n\n{offer}".strip()
            return messages, None
        return messages, offer

    def _variables(self, tokenizer: Any, template: str) -> dict[str, Any]:
        reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters)
        reserved |= {"messages", "tools", "add_generation_prompt"}
        taken = sorted(reserved & set(self.variables))
        if taken:
            raise ApiError(
                400,
                f"chat_template_kwargs must not set {', '.join(taken)}",
                param="chat_template_kwargs",
            )
        unread = [name for name in self.variables if name not in template]
        if unread:
            raise ApiError(
                400,
                f"the target's chat template does not read {', '.join(unread)}",
                param="chat_template_kwargs",
            )
        found = dict(self.variables) | self._thinking(template)
        if self.tools.active and family_of(template) is not None:
            found["tools"] = [
                {"type": "function", "function": dict(f)} for f in self.tools.functions
            ]
        return found

    def _thinking(self, template: str) -> dict[str, Any]:
        if self.effort is None:
            return {}
        graded, switch = "reasoning_effort" in template, "enable_thinking" in template
        if graded and self.effort not in ("none", "on"):
            return {"reasoning_effort": self.effort}
        if switch:
            return {"enable_thinking": self.effort != "none"}
        if self.effort == "on" and (graded or thinks(template)):
            return {}
        if self.effort == "none" and not thinks(template):
            return {}
        raise ApiError(
            400,
            f"reasoning {self.effort!r}: the target's chat template has no such switch",
            param="reasoning_effort",
        )


@dataclass(frozen=True)
class Understood:
    """A conversation in the engine's words."""

    ids: list[int]
    held: dict[str, Any]
    split: partial[Splitter]


def template_of(tokenizer: Any) -> str:
    """The chat template's text. Raises ApiError where the target has none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    if not template:
        raise ApiError(
            400, "this target has no chat template, so it takes no messages: use /v1/completions"
        )
    return str(template)
