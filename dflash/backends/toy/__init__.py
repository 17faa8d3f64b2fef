"""A strict fake of a whole pair: no weights, no array library, the same answers everywhere.

The target writes words that depend on every token before them. It is strict as a real cache is:
its state is a chain of hashes, one row per token run through it, so one row too many or too few
after a ``commit`` changes all that follows. The drafts are scripted: right for so many tokens, then
wrong. They check every row they are told; one that was told too little, too much or the wrong thing
is wrong from then on, as a real one would be.

Names for ``open_pair``: target ``toy``; drafts ``toy:oracle`` (always right), ``toy:script:1,3,0``
(right for 1, 3, 0 tokens in rounds 1, 2, 3, then from the start again), ``toy:random``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash.backends.toy.draft import ScriptedDraft, ToyDraft
from dflash.backends.toy.model import EOS, Ahead, State, ToyModel
from dflash.backends.toy.target import ToyTarget
from dflash.config import LoadConfig
from dflash.core.types import Request
from dflash.errors import CheckpointError, ConfigError

__all__ = [
    "Ahead",
    "ScriptedDraft",
    "State",
    "ToyDraft",
    "ToyModel",
    "ToyPair",
    "ToyTarget",
    "ToyTokenizer",
    "open_pair",
]


class ToyTokenizer:
    """Text as UTF-8 bytes; ids from 256 on are special and print nothing."""

    vocabulary = (*(bytes([i]) for i in range(EOS)), b"", b"")  # end of text and mask say nothing
    chat_template = "role: content"
    joins_bytes = True
    eos_token_id = EOS

    def encode(self, text: str) -> list[int]:
        """One id per byte."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes to text; what is no character prints as U+FFFD."""
        return bytes(token for token in ids if token < EOS).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **_: bool) -> str:
        """A line per message, and the assistant's name at the end."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + "assistant: "


@dataclass(frozen=True)
class ToyPair:
    """The pair behind ``open_pair``; tests make their own with other models and scripts."""

    model: ToyModel = field(default_factory=ToyModel)
    draft_name: str | None = None
    ahead: Ahead | None = None  # None = the model's own
    script: Sequence[int] | None = None
    chunk: int = 64
    draft_block_size: int | None = 16
    default_block_size: int | None = 8
    context_length: int = 4096
    target_name = backend = "toy"
    tokenizer = ToyTokenizer()

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return self.model.vocab_size

    @property
    def eos_ids(self) -> frozenset[int]:
        """What ends a text."""
        return self.model.eos_ids

    def runs_on(self) -> Mapping[str, str]:
        """Nothing: its speed says nothing of any machine."""
        return {}

    def memory(self) -> Mapping[str, int]:
        """It has no weights."""
        return {"target": 0, "draft": 0}

    def open_target(self, capacity: int) -> ToyTarget:  # noqa: ARG002 - lists grow by themselves
        """A fresh session."""
        return ToyTarget(self.model, self.chunk)

    def open_drafts(self, capacity: int) -> list[ScriptedDraft]:  # noqa: ARG002
        """One fresh scripted draft, or none."""
        if self.draft_name is None:
            return []
        most = (self.draft_block_size or 1) - 1
        return [ToyDraft(self.model, self.ahead or self.model.ahead, self.script, most)]

    def why_no_trees(self) -> str:
        """It can."""
        return ""

    def close(self) -> None:
        """Nothing to free."""


REAL = (
    "dtype",
    "draft_dtype",
    "taps",
    "force_dflash",
    "trust_remote_code",
)
"""What can be said of a real pair only. Device "cpu", float32 and any number of threads do no harm
here, nor does a window: a toy draft reads a few tokens of any context."""


def _insist_on_toy(load: LoadConfig) -> None:
    """Raise ConfigError for a setting that would change nothing here."""
    given = [name for name in REAL if getattr(load, name) not in (None, False, "float32")]
    if load.device not in (None, "cpu"):
        given.append("device")
    if given:
        raise ConfigError(
            f"{' and '.join(given)}: the built-in fake has no weights, no layers and no device "
            "that this could change. Leave it out, or name a real model"
        )


def open_pair(load: LoadConfig) -> ToyPair:
    """The toy pair that ``load`` names.

    Raises CheckpointError or ConfigError for other names and for settings of real pairs.
    """
    _insist_on_toy(load)
    if load.target != "toy":
        raise CheckpointError(
            f"the toy backend has one target, 'toy', and not {load.target!r}: "
            "leave out backend='toy' to load a real one"
        )
    if load.draft is None:
        return ToyPair(draft_block_size=None, default_block_size=None)
    kind, _, script = load.draft.removeprefix("toy:").partition(":")
    if kind == "oracle" and not script:
        return ToyPair(draft_name=load.draft)
    if kind == "random" and not script:
        return ToyPair(draft_name=load.draft, ahead=_noise)
    if kind == "script" and all(part.isdecimal() for part in script.split(",")):
        return ToyPair(draft_name=load.draft, script=[int(part) for part in script.split(",")])
    raise ConfigError(
        f"unknown toy draft {load.draft!r}: write toy:oracle, toy:random or toy:script:1,3,0"
    )


def _noise(request: Request, output: Sequence[int], count: int) -> list[int]:
    bits = np.random.Philox(key=[len(request.prompt), len(output)])
    return [int(word % 256) for word in bits.random_raw(count)]
