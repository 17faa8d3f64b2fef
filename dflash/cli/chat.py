"""``dflash chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import import_module
from typing import TYPE_CHECKING, Any, TextIO

from dflash.checks import counted
from dflash.cli import engine_flags as e
from dflash.cli import options as o
from dflash.cli import text_options as t
from dflash.cli.given import insist_on_block, open_engine, settings_of, standard_input
from dflash.cli.groups import Given, flat, with_groups
from dflash.cli.output import TextWriter, closing_line, error, note, status
from dflash.errors import PromptError
from dflash.results import joined

if TYPE_CHECKING:
    from dflash.core.stats import Stats
    from dflash.engine import Engine

HELP = (
    "/reset forgets the conversation, /stats shows figures of all answers, /help shows this, /exit "
    "(or /quit, or Ctrl-D) leaves; Ctrl-C stops an answer"
)
ANSWER_ROOM = 64  # tokens kept free for an answer before old turns are dropped


@with_groups
def chat(
    pair: Given = o.PAIR_FLAGS,
    force_dflash: o.ForceDFlash = False,
    engine_flags: Given = e.FLAGS,
    no_profile: o.NoProfile = False,
    no_mtp: o.NoMtp = False,
    max_tokens: o.MaxTokens = 512,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    shape: Given = t.SHAPE_FLAGS,
    seed: o.Seed = None,
    stop: o.Stop = None,
    system: o.System = None,
    block_size: o.BlockSize = None,
    draft_tokens: o.DraftTokens = None,
    min_acceptance_rate: o.MinAcceptanceRate = None,
    draft_tree: o.DraftTree = "0",
    strict_mode: o.Strict = False,
    preset: o.Preset = None,
    show_drafts: o.ShowDrafts = False,
    debug: o.Debug = False,
) -> None:
    """Talk with the model. /reset, /stats, /help, /exit; Ctrl-C stops an answer, Ctrl-D leaves.

    With --seed the first answer is that of generate, and every later turn has a seed derived from
    it and from its number since the last /reset.
    """
    given = {**flat(locals()), "no_chat_template": False}
    settings, typed = settings_of(given), standard_input()
    with open_engine(given) as engine:
        insist_on_block(engine, settings)
        talk = Conversation(engine, settings, show_drafts)
        status(HELP)
        for line in _lines(typed):
            if not talk.obey(line):
                break


def _lines(typed: TextIO) -> Iterator[str]:
    """What the user types, until the end of input; the terminal's own line editing where it is."""
    ask = "> " if typed.isatty() and sys.stdout.isatty() else ""
    if ask:
        with suppress(ImportError):  # history and arrow keys, where Python has them
            import_module("readline")
    while True:
        try:
            line = input(ask) if ask else typed.readline()
        except EOFError:  # Ctrl-D, on the line of the question
            print(flush=True)
            return
        if not line and not ask:
            return
        yield line.strip()


@dataclass
class Conversation:
    """Turns so far. Nothing else is kept: the engine finds the shared beginning by itself."""

    engine: Engine
    settings: dict[str, Any]
    show_drafts: bool = False
    turns: list[dict[str, str]] = field(default_factory=list)
    answers: list[Stats] = field(default_factory=list)
    turn: int = 0  # answers begun since the last /reset; more than are still in `turns`

    def obey(self, line: str) -> bool:
        """Answer a line or run a /command; False = the user wants to leave."""
        if line in ("/exit", "/quit"):
            return False
        if line == "/reset":
            self.turns.clear()
            self.turn = 0
            status("the conversation is forgotten; /stats goes on counting")
        elif line == "/stats":
            self._show_stats()
        elif line == "/help":
            status(HELP)
        elif line.startswith("/"):
            note(f"no such command. {HELP}")
        elif line:
            self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        self.turns.append({"role": "user", "content": line})
        try:
            self._make_room()
        except PromptError as problem:
            self.turns.pop()
            error(str(problem))
            return
        writer, chunks = TextWriter(self.show_drafts), []
        try:
            for chunk in self.engine.stream(self.turns, **self._drawn_anew()):
                writer.write(chunk)
                chunks.append(chunk)
        except KeyboardInterrupt:
            writer.end()
            note("stopped; the part above stays in the conversation")
        writer.end()
        self.turns.append({"role": "assistant", "content": "".join(c.text for c in chunks)})
        if chunks and chunks[-1].stats is not None:
            answer = joined(chunks)
            self.answers.append(answer.stats)
            status(closing_line(answer, self.settings["max_tokens"]))

    def _drawn_anew(self) -> dict[str, Any]:
        """The settings of the next turn: one seed for all would repeat the noise of the first."""
        seed, turn = self.settings["seed"], self.turn
        self.turn += 1
        if seed is None or turn == 0:
            return self.settings
        digest = sha256(f"{seed}/{turn}".encode()).digest()
        return {**self.settings, "seed": int.from_bytes(digest[:4])}

    def _make_room(self) -> None:
        """Drop the oldest exchanges for room. Raises PromptError when one turn is too long."""
        room = min(ANSWER_ROOM, self.settings["max_tokens"])
        dropped = 0
        while self._length() + room > self.engine.pair.context_length and len(self.turns) > 1:
            del self.turns[:2]
            dropped += 1
        if self._length() >= self.engine.pair.context_length:
            raise PromptError(
                f"this message alone has {self._length()} tokens with the template, and the "
                f"context holds {self.engine.pair.context_length}: shorten it"
            )
        if dropped:
            note(f"the context is full: dropped the oldest {2 * dropped} messages")

    def _length(self) -> int:
        return len(self.engine.encode(self.turns, system=self.settings["system"]))

    def _show_stats(self) -> None:
        if not self.answers:
            status("nothing generated yet")
            return
        tokens = sum(stats.completion_tokens for stats in self.answers)
        rounds = sum(stats.rounds for stats in self.answers)
        drafted = sum(stats.drafted for stats in self.answers)
        accepted = sum(stats.accepted for stats in self.answers)
        passes = counted(rounds, "pass", "passes")
        answers = counted(len(self.answers), "answer")
        status(f"{answers} · {counted(tokens, 'token')} in {passes} after prefill")
        if drafted:
            share = f"{100 * accepted / drafted:.0f} %"
            status(f"{accepted} of {counted(drafted, 'draft')} accepted ({share})")
        if self.turns:
            status(f"context: {self._length()} of {self.engine.pair.context_length} tokens")
