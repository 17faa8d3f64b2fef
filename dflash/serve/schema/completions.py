"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from dflash.serve.config import MOST_CHOICES
from dflash.serve.schema.common import (
    Sampling,
    Several,
    StreamOptions,
    StructuredOutputs,
    Token,
    only_with,
    unsupported,
)

DEFAULT_TOKENS = 16  # as the API has it
MOST_TEXTS = 8 * MOST_CHOICES  # prompts x n


class CompletionRequest(Sampling, Several):
    """Text, or token ids, to be continued as they stand."""

    prompt: str | list[Token] | list[str] | list[list[Token]]
    max_tokens: int | None = Field(None, ge=0, description="Default 16, as the API has it.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    structured_outputs: StructuredOutputs | None = None
    suffix: str | None = None
    best_of: int | None = None

    def check(self) -> None:
        """Refuse what the API has and this server has not, and contradictions. Raises ApiError."""
        only_with("stream_options", self.stream_options, "stream", self.stream)
        unsupported("suffix", self.suffix, ("",))
        unsupported("best_of", self.best_of, (1, self.n or 1))

    def prompts(self) -> list[str] | list[list[int]]:
        """One text, or one list of ids, each."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        given: list[Any] = self.prompt
        return [given] if given and isinstance(given[0], int) else given
