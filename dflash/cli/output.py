"""What a terminal shows: streamed text, who made it, the closing line, notes, errors, JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.checks import counted

if TYPE_CHECKING:
    from dflash.core.stats import Stats
    from dflash.core.types import Logprob
    from dflash.results import Chunk, Generation

DRAFT_COLOUR, PLAIN_COLOUR, BOLD, DIM, RED = "\x1b[32m", "\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[31m"


class TextWriter:
    """Streams chunks to standard output; with ``show_drafts`` one sees who made each part.

    Accepted drafts are green. Where there is no colour (a pipe, NO_COLOR) they stand in brackets.
    """

    def __init__(self, show_drafts: bool = False) -> None:
        """Looks at standard output once."""
        self._show = show_drafts
        self._colour = has_colour(sys.stdout)
        self._brackets = ("⟦", "⟧") if can_show("⟦⟧") else ("[", "]")
        self._last = "\n"

    def write(self, chunk: Chunk) -> None:
        """Print what the chunk adds, now."""
        if self._show:
            text = "".join(self._marked(piece.text, piece.source) for piece in chunk.pieces)
        else:
            text = chunk.text
        sys.stdout.write(text)
        sys.stdout.flush()
        self._last = chunk.text[-1:] or self._last

    def end(self) -> None:
        """Leave the cursor at the beginning of a line."""
        if self._last != "\n":
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._last = "\n"

    def legend(self) -> str:
        """How to read the colours; "" where nothing is marked."""
        if not self._show:
            return ""
        return f"{self._marked('accepted drafts', 'draft')}, target"

    def _marked(self, text: str, source: str) -> str:
        if source != "draft":
            return text
        left, right = (DRAFT_COLOUR, PLAIN_COLOUR) if self._colour else self._brackets
        return f"{left}{text}{right}"


def forgive_characters() -> None:
    """Print a mark where standard output has no such character, instead of failing there."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def can_show(text: str) -> bool:
    """Whether standard output has all these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def has_colour(stream: Any) -> bool:
    """Whether ``stream`` is a terminal with colours that are wanted."""
    from rich.console import Console  # knows NO_COLOR, FORCE_COLOR, TERM and Windows

    console = Console(file=stream)
    return console.color_system is not None and not console.no_color


def note(text: str) -> None:
    """One line for the person at the terminal."""
    _say(f"note: {text}", DIM)


def error(text: str) -> None:
    """What went wrong."""
    _say(f"error: {text}", RED)


def status(text: str) -> None:
    """Progress and figures."""
    _say(text, DIM)


def _say(text: str, style: str) -> None:
    if has_colour(sys.stderr):
        text = f"{style}{text}{PLAIN_COLOUR}"
    print(text, file=sys.stderr, flush=True)


def emit_json(value: Mapping[str, Any]) -> None:
    """One JSON object on standard output; escaped where the output cannot hold its characters."""
    text = json.dumps(value, ensure_ascii=False)
    print(text if can_show(text) else json.dumps(value), flush=True)


def as_json(generation: Generation, named: Callable[[int], str] = str) -> dict[str, Any]:
    """The object of ``--json``; ``named`` gives the text of a token.

    ``logprobs`` is there only when asked for, and ``choices``, the first one included, only when
    there are several.
    """
    found = _choice(generation, named)
    if generation.others:
        found["choices"] = [_choice(choice, named) for choice in generation.choices]
    return found


def _choice(generation: Generation, named: Callable[[int], str]) -> dict[str, Any]:
    found = {
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "finish_reason": generation.finish_reason,
        "stats": generation.stats.to_json(),
    }
    if generation.logprobs is not None:
        found["logprobs"] = [_entry(entry, named) for entry in generation.logprobs]
    return found


def _entry(entry: Logprob, named: Callable[[int], str]) -> dict[str, Any]:
    top = [{"token_id": i, "text": named(i), "logprob": value} for i, value in entry.top]
    return {
        "token_id": entry.token,
        "text": named(entry.token),
        "logprob": entry.logprob,
        "top": top,
    }


def logprob_lines(generation: Generation, named: Callable[[int], str]) -> Iterator[str]:
    """A line for each token: its text, log-probability, and the alternatives."""
    for entry in generation.logprobs or ():
        others = "  ".join(f"{named(i)!r} {value:.3f}" for i, value in entry.top)
        yield f"{named(entry.token)!r:>16} {entry.logprob:8.3f}  {others}".rstrip()


def compared(answer: Generation, plain: Generation) -> dict[str, Any]:
    """What ``--compare`` adds to the object of ``--json``."""
    return {
        "plain": {
            "token_ids": list(plain.token_ids),
            "tokens_per_second": plain.stats.tokens_per_second,
        },
        "identical": answer.token_ids == plain.token_ids,
        "speedup": speedup(answer.stats, plain.stats),
    }


def closing_line(answer: Generation, most: int) -> str:
    """Tokens, speed, what the draft was worth; and whether the text ended by itself.

    ``most`` is how many tokens were asked for.
    """
    stats = answer.stats
    parts = [counted(stats.completion_tokens, "token")]
    if answer.finish_reason == "length":
        full = stats.completion_tokens < most
        parts[0] += " (cut off: the context is full)" if full else " (cut off by --max-tokens)"
    if stats.rounds:
        parts.append(f"{stats.tokens_per_second:.1f} tok/s")
    if stats.drafted:
        parts.append(f"{stats.mean_committed:.2f} committed per pass")
        parts.append(f"{100 * stats.acceptance_rate:.0f} % of drafts accepted{_shares(stats)}")
        parts.append(f"block {stats.block_size if stats.block_size is not None else 'auto'}")
    else:
        parts.append(f"plain decoding{_why_plain(stats)}")
    parts.append(f"first token {stats.time_to_first_token:.2f} s")
    return " · ".join(parts)


def _why_plain(stats: Stats) -> str:
    """Why nothing was drafted, where it was not what somebody asked for."""
    if stats.policy != "adaptive":
        return f" ({stats.fallback_reason})" if stats.fallback_reason else ""
    return f" (auto: {stats.fallback_reason})" if stats.fallback_reason else " (auto)"


def _shares(stats: Stats) -> str:
    """Who drafted, where it was more than one."""
    if len(stats.by_draft) < 2:
        return ""
    parts = [f"{Path(s.draft).name} {s.accepted} of {s.drafted}" for s in stats.by_draft]
    return f" ({', '.join(parts)})"


def comparison_line(fast: Generation, plain: Generation) -> str:
    """The measured ratio to plain decoding, and whether the ids are the same."""
    ratio, same = speedup(fast.stats, plain.stats), fast.token_ids == plain.token_ids
    verdict = "ids identical"
    if not same:
        place = _first_difference(fast, plain)
        verdict = f"ids DIFFER from token {place}: dflash verify tells a tie from a fault"
    elif not fast.stats.drafted:
        verdict += ", but nothing was drafted (--block-size 4 drafts anyway)"
    speed = "too short to time" if ratio is None else f"{ratio:.2f} x plain decoding"
    return f"{speed} ({plain.stats.tokens_per_second:.1f} tok/s) · {verdict}"


def speedup(fast: Stats, plain: Stats) -> float | None:
    """Ratio of decode speeds, prefill left out; None when one of them had no round."""
    if not fast.tokens_per_second or not plain.tokens_per_second:
        return None
    return fast.tokens_per_second / plain.tokens_per_second


def quiet_libraries() -> None:
    """Only errors of the libraries underneath; their advice is for programmers."""
    for name in ("transformers", "huggingface_hub", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _first_difference(one: Generation, other: Generation) -> int:
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    shorter = min(len(one.token_ids), len(other.token_ids))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), shorter)
