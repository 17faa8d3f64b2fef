"""Fields that several APIs share, and how they become options of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dflash.checks import LARGEST
from dflash.serve.config import MOST_CHOICES
from dflash.serve.errors import ApiError


class Wire(BaseModel):
    """A JSON object with known fields only; numbers are numbers and text is text.

    A field that is null says nothing, whatever its name: clients send back what they were sent.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _said(cls, given: Any) -> Any:
        """What is not null."""
        return without_none(given) if isinstance(given, dict) else given


class Problem(BaseModel):
    """Why there is no answer."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """The body of every error; Anthropic's routes have ``type: error`` beside it."""

    error: Problem


class Speculative(Wire):
    """Speculation for one request."""

    enabled: bool = Field(True, description="False decodes plainly.")
    block_size: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        None, description="Rows of one verify pass, anchor included; clamped to the draft's native."
    )


Token = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1)]  # an empty one would end every text


class Sampling(Wire):
    """How tokens are chosen; the fields every completion API here has."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, description="Default 1, as these APIs have it.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 or -1: off.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=1 / LARGEST, le=LARGEST)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    no_repeat_ngram: int | None = Field(None, ge=0)
    logit_bias: dict[str, float] | None = None
    bad_words: list[list[Token]] | None = Field(None, description="Sequences of token ids.")
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    thinking_budget: int | None = Field(None, ge=0, description="Tokens of reasoning at most.")
    speculative: Speculative | None = None
    deadline: float | None = Field(None, gt=0, description="Seconds this request may take.")

    def chosen(self) -> dict[str, Any]:
        """Keywords of ``Engine.stream``, those that were given."""
        found = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "no_repeat_ngram": self.no_repeat_ngram,
            "logit_bias": self.logit_bias,
            "bad_words": self.bad_words,
            "seed": self.seed,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens,
            "thinking_budget": self.thinking_budget,
        }
        return without_none(found)


class Several(Wire):
    """What OpenAI's two completion APIs have beyond that."""

    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: StopString | list[StopString] | None = None
    user: str | None = None


class StreamOptions(Wire):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    include_origins: bool | None = Field(
        default=None,
        description="A field `origins` in each chunk: who made which token, pass by pass.",
    )


class StructuredOutputs(Wire):
    """What the text must be; one of the four."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = Field(None, min_length=1)

    def held(self) -> dict[str, Any]:
        """The engine's keyword for it. Raises ApiError unless exactly one is given."""
        given = [
            ("json_schema", self.json_),
            ("regex", self.regex),
            ("grammar", self.grammar),
            ("regex", None if self.choice is None else "|".join(map(_literally, self.choice))),
        ]
        found = [(name, value) for name, value in given if value is not None]
        if len(found) != 1:
            raise ApiError(
                400,
                "structured_outputs takes one of json, regex, grammar and choice",
                param="structured_outputs",
            )
        return dict(found)


def _literally(text: str) -> str:
    """``text`` as a regular expression for nothing else."""
    special = set(r"\.^$*+?{}[]|()/-")
    return "(" + "".join(f"\\{c}" if c in special else c for c in text) + ")"


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` without those that were not given."""
    return {name: value for name, value in values.items() if value is not None}


def only_with(param: str, value: Any, other: str, there: Any) -> None:
    """Refuse a field that says nothing unless ``other`` is asked for. Raises ApiError."""
    if value and not there:
        raise ApiError(400, f"{param} says nothing without {other}: send both", param=param)


def unsupported(param: str, value: Any, harmless: tuple[Any, ...] = ()) -> None:
    """Refuse a field of the API that nothing here honours, unless it asks for nothing.

    Raises ApiError naming ``param``.
    """
    if value is not None and value not in harmless:
        raise ApiError(400, f"{param}={value!r} is not supported by this server", param=param)
