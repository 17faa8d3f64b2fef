"""The flags that shape a text: penalties, bans, grammars, and what is reported of its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash.cli.groups import Flag, Group
from dflash.errors import ConfigError

PANEL = "Shape of the text"


def _shape(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=PANEL, **more)


MinP = Annotated[
    float, _shape("--min-p", help="Drop tokens below this share of the likeliest one's chance.")
]
RepetitionPenalty = Annotated[
    float, _shape("--repetition-penalty", help="Make tokens of prompt and answer less likely.")
]
PresencePenalty = Annotated[
    float, _shape("--presence-penalty", help="Taken from tokens of the answer, once.")
]
FrequencyPenalty = Annotated[
    float, _shape("--frequency-penalty", help="Taken from tokens of the answer, each time.")
]
NoRepeatNgram = Annotated[
    int, _shape("--no-repeat-ngram", metavar="N", help="Runs of N tokens occur once; 0 = off.")
]
MinTokens = Annotated[int, _shape("--min-tokens", help="Do not end before that many tokens.")]
LogitBias = Annotated[
    list[str] | None,
    _shape("--logit-bias", metavar="ID=BIAS", help="Added to a token's logit; may be repeated."),
]
JsonSchema = Annotated[
    str | None,
    _shape("--json-schema", metavar="JSON|FILE", help="Answer with JSON of this schema."),
]
Regex = Annotated[
    str | None, _shape("--regex", metavar="PATTERN", help="Answer with text of this pattern.")
]
Grammar = Annotated[
    str | None,
    _shape("--grammar", metavar="EBNF|FILE", help="Answer with text of this grammar's root rule."),
]
ThinkingBudget = Annotated[
    int | None,
    _shape("--thinking-budget", metavar="N", help="Tokens of reasoning at most; then it is ended."),
]
Logprobs = Annotated[
    int | None,
    _shape("--logprobs", metavar="K", help="Report log-probabilities, of K alternatives too."),
]
Count = Annotated[int, _shape("--n", metavar="N", help="Answers to the same prompt.")]

SHAPE_FLAGS = Group(
    {
        "min_p": Flag(MinP, 0.0),
        "repetition_penalty": Flag(RepetitionPenalty, 1.0),
        "presence_penalty": Flag(PresencePenalty, 0.0),
        "frequency_penalty": Flag(FrequencyPenalty, 0.0),
        "no_repeat_ngram": Flag(NoRepeatNgram, 0),
        "logit_bias": Flag(LogitBias),
        "min_tokens": Flag(MinTokens, 0),
        "json_schema": Flag(JsonSchema),
        "regex": Flag(Regex),
        "grammar": Flag(Grammar),
        "thinking_budget": Flag(ThinkingBudget),
    }
)
"""What every command that writes a text takes."""


def shape(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options among a command's parameters that have another form there. Raises ConfigError."""
    found: dict[str, Any] = {}
    if given.get("logit_bias"):
        found["logit_bias"] = _biases(given["logit_bias"])
    if given.get("json_schema") is not None:
        found["json_schema"] = _text_or_file("--json-schema", given["json_schema"], "{")
    if given.get("grammar") is not None:
        found["grammar"] = _text_or_file("--grammar", given["grammar"], "::=")
    return found


def _biases(given: Sequence[str]) -> dict[int, float]:
    found: dict[int, float] = {}
    for text in given:
        token, _, bias = text.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError:
            raise ConfigError(
                f"--logit-bias is a token id, = and a number, as in 50256=-100; got {text!r}"
            ) from None
    return found


def _text_or_file(flag: str, given: str, mark: str) -> str:
    """``given`` where it has the ``mark`` of a text, else what the file of that name holds."""
    if mark in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError):
        raise ConfigError(
            f"{flag} is neither a text with {mark!r} in it nor a file that can be read: {given!r}"
        ) from None
