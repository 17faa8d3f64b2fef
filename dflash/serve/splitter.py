"""Text as it comes, told apart: reasoning, content, tool calls.

Text that may be the beginning of a mark is held back until that is certain; what was held back and
was none comes out again. Reasoning, content and calls joined are the text, marks left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from dflash.core.text import overlap
from dflash.serve.calls import Call, Family
from dflash.thinking import BEGIN, END


class Delta(NamedTuple):
    """What a piece of text adds."""

    kind: Literal["content", "reasoning", "call"]
    text: str
    call: Call | None = None


class Splitter:
    """Splits one text. ``feed`` it in pieces, then ``finish``."""

    def __init__(
        self,
        *,
        think: bool = False,
        inside: bool = False,
        family: Family | None = None,
        offered: Mapping[str, Any] | None = None,
        most_calls: int | None = None,
        fits: Callable[[Call], bool] = lambda _: True,
    ) -> None:
        """``think``: a leading <think> begins reasoning. ``inside``: the prompt has begun it.

        ``family`` and ``offered`` (name -> schema): how calls are written, and of what; those
        that do not ``fits`` are text.
        """
        self._fits = fits
        self._family, self._offered, self._most_calls = family, offered or {}, most_calls
        self._calls = 0
        self._held = ""
        self._gap = ""  # layout before a call, which is text where the call is none
        self._found: list[Delta] = []
        self._state = "reasoning" if inside else "start" if think else "content"
        self._strip = False  # white space after a mark belongs to the layout

    @property
    def reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._state == "reasoning"

    def feed(self, text: str) -> list[Delta]:
        """What is certain now."""
        self._held += text
        self._found = []
        while self._step():
            pass
        return _merged(self._found)

    def finish(self) -> list[Delta]:
        """The rest, as what it has turned out to be."""
        found = self.feed("")
        rest, self._held = self._held, ""
        if self._state in ("call", "bare"):
            assert self._family is not None, "calls have a family"
            opening = self._gap + self._family.opening if self._state == "call" else ""
            found += self._called(rest, opening + rest)
        elif rest:
            found.append(Delta("reasoning" if self._state == "reasoning" else "content", rest))
        return _merged(found)

    def _step(self) -> bool:
        """One move between states; False = more text is needed."""
        if self._strip:
            self._held = self._held.lstrip()
            self._strip = not self._held
        return bool(self._held) and bool(getattr(self, f"_in_{self._state}")())

    def _in_start(self) -> bool:
        text = self._held.lstrip()
        if text.startswith(BEGIN):
            self._held, self._state, self._strip = text[len(BEGIN) :], "reasoning", True
            return True
        if not BEGIN.startswith(text):
            self._state = "content"
            return True
        return False

    def _in_reasoning(self) -> bool:
        before, mark, after = self._held.partition(END)
        if mark:
            self._found.append(Delta("reasoning", before.rstrip()))
            self._held, self._state, self._strip = after, "content", True
            return True
        certain = len(self._held) - overlap(self._held, END)
        certain = len(self._held[:certain].rstrip())  # layout before the mark, should it come
        return self._release("reasoning", certain)

    def _in_content(self) -> bool:
        family = self._family
        if family is None:
            return self._release("content", len(self._held))
        if not family.opening:
            text = self._held.lstrip()
            if text:
                self._state = "bare" if _may_be_a_call(text, self._offered) else "text"
            return bool(text)
        before, mark, after = self._held.partition(family.opening)
        if mark:
            if before.strip():
                self._found.append(Delta("content", before.rstrip()))
            self._gap = before[len(before.rstrip()) :]
            self._held, self._state = after, "call"
            return True
        certain = len(self._held) - overlap(self._held, family.opening)
        certain = len(self._held[:certain].rstrip())
        return self._release("content", certain)

    def _in_text(self) -> bool:
        return self._release("content", len(self._held))

    def _in_bare(self) -> bool:
        return False  # the whole answer decides

    def _in_call(self) -> bool:
        assert self._family is not None, "calls have a family"
        body, mark, after = self._held.partition(self._family.closing)
        if not mark:
            return False
        found = self._called(body, self._gap + self._family.opening + body + mark)
        self._found += found
        self._held, self._state = after, "content"
        self._strip = found[:1] != [] and found[0].kind == "call"
        return True

    def _called(self, body: str, whole: str) -> list[Delta]:
        assert self._family is not None, "calls have a family"
        calls = self._family.read(body.strip(), self._offered)
        if calls is None or not all(map(self._fits, calls)):
            return [Delta("content", whole)]
        if self._most_calls is not None:
            calls = calls[: max(0, self._most_calls - self._calls)]
        self._calls += len(calls)
        return [Delta("call", "", call) for call in calls]

    def _release(self, kind: Literal["content", "reasoning"], n: int) -> bool:
        if n > 0:
            self._found.append(Delta(kind, self._held[:n]))
            self._held = self._held[n:]
        return False


def _may_be_a_call(text: str, offered: Mapping[str, Any]) -> bool:
    if text[0] in "{[" or text.startswith("<|python_tag|>"):
        return True
    return any(text.startswith(name) or name.startswith(text) for name in offered)


def _merged(found: list[Delta]) -> list[Delta]:
    """Neighbours of one kind joined, empty ones left out."""
    merged: list[Delta] = []
    for delta in found:
        if delta.kind != "call" and not delta.text:
            continue
        if merged and delta.kind != "call" and merged[-1].kind == delta.kind:
            merged[-1] = Delta(delta.kind, merged[-1].text + delta.text)
        else:
            merged.append(delta)
    return merged
