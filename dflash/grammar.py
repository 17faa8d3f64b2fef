"""Text held to a JSON schema, a regular expression or a grammar, through xgrammar.

The matcher lives on the host and walks both ways: to look at a place inside a block it takes the
drafts before it, to look at another it takes them back. Only committed tokens stay. What a schema
may say is xgrammar's to decide; a text that max_tokens cut off is only the beginning of one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.core.protocols import Pair
from dflash.core.types import Grammar
from dflash.errors import ConfigError, missing

# JSON wants these escaped inside strings, which not every rule of xgrammar insists on.
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_PLACE = re.compile(r"^\[[\d:]+\] \S+: ")  # where in xgrammar it happened
MOST_KEPT = 64  # compiled constraints
MOST_SPACE = 32  # white space in a row in JSON: enough for any layout, and small models end


class Grammars:
    """Compiles constraints for one pair, each once, and starts a matcher for every text."""

    def __init__(self, pair: Pair) -> None:
        """Nothing is imported before the first constraint."""
        self._pair, self._lock = pair, Lock()
        self._compiler: Any = None
        self._raw = np.zeros(pair.vocab_size, dtype=bool)  # tokens that JSON strings may not hold
        self._compiled: dict[tuple[str, str], Any] = {}

    def start(self, constraint: tuple[str, str] | None) -> Grammar | None:
        """A fresh matcher for (json_schema, regex or grammar; its text); None for None.

        Raises ConfigError for a text that is none of its kind, MissingBackend without xgrammar.
        """
        if constraint is None:
            return None
        with self._lock:
            if constraint not in self._compiled:
                self._compiled[constraint] = self._compile(*constraint)
                while len(self._compiled) > MOST_KEPT:
                    del self._compiled[next(iter(self._compiled))]  # the oldest
            never = self._raw if constraint[0] == "json_schema" else None
            return Matched(self._compiled[constraint], self._pair.vocab_size, never)

    def _compile(self, kind: str, text: str) -> Any:
        if self._compiler is None:
            info = _tokens_of(self._pair)
            self._compiler = import_module("xgrammar").GrammarCompiler(info, cache_enabled=False)
            for token, spelt in enumerate(info.decoded_vocab):
                self._raw[token] = _CONTROL.search(spelt) is not None
        compiler = self._compiler
        try:
            if kind == "json_schema":
                return compiler.compile_json_schema(text, max_whitespace_cnt=MOST_SPACE)
            if kind == "regex":
                return compiler.compile_regex(text)
            return compiler.compile_grammar(text)
        except (RuntimeError, ValueError) as problem:  # xgrammar's own derive from these
            reason = _PLACE.sub("", str(problem).strip().splitlines()[-1])
            raise ConfigError(f"this {kind} cannot be used: {reason}") from problem


class Matched:
    """The Grammar protocol over one xgrammar matcher."""

    def __init__(self, compiled: Any, size: int, never: NDArray[np.bool_] | None = None) -> None:
        """``size`` is the target's vocabulary, padding included; ``never`` [V] what is forbidden
        beside."""
        self._matcher, self._size = import_module("xgrammar").GrammarMatcher(compiled), size
        self._never = never
        self._bits = np.zeros((1, (size + 31) // 32), np.int32)
        self._mask: NDArray[np.bool_] | None = None  # of the place where the matcher stands
        self._ahead: list[int] = []  # drafts the matcher stands behind

    def allow(self, draft: Sequence[int]) -> NDArray[np.bool_] | None:
        """Mask [V] for the place after the committed tokens and ``draft``; None = out of reach."""
        return self._here() if self._go(draft) and not self._matcher.is_terminated() else None

    def commit(self, tokens: Sequence[int]) -> None:
        """Advance for good by tokens that were chosen under the masks."""
        reached = self._go(tokens)
        assert reached, "a token was committed that the grammar forbids"
        self._ahead = []

    def _go(self, draft: Sequence[int]) -> bool:
        """Stand after ``draft``; False where it is not allowed, standing as far as it is."""
        shared = 0
        while shared < min(len(draft), len(self._ahead)) and draft[shared] == self._ahead[shared]:
            shared += 1
        if shared < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - shared)
            self._mask = None
            del self._ahead[shared:]
        for token in draft[shared:]:
            # asked first, because the matcher complains aloud about what it must not accept
            if self._matcher.is_terminated() or not self._here()[token]:
                return False
            accepted = self._matcher.accept_token(token)
            assert accepted, "the mask allowed what the matcher does not"
            self._ahead.append(token)
            self._mask = None
        return True

    def _here(self) -> NDArray[np.bool_]:
        if self._mask is None:
            self._matcher.fill_next_token_bitmask(self._bits)
            bits = np.unpackbits(self._bits.view(np.uint8)[0], bitorder="little")
            self._mask = bits[: self._size].astype(bool)
            if self._never is not None:
                self._mask &= ~self._never
        return self._mask


def _tokens_of(pair: Pair) -> Any:
    """The target's vocabulary as xgrammar knows it."""
    try:
        xgrammar = import_module("xgrammar")
    except ImportError as problem:
        raise missing("text held to a grammar needs xgrammar", "grammar") from problem
    if not pair.eos_ids:
        raise ConfigError(
            "the target has no end-of-text token, so a text held to a grammar could not end"
        )
    options: Any = {"vocab_size": pair.vocab_size, "stop_token_ids": sorted(pair.eos_ids)}
    tokens = getattr(pair.tokenizer, "vocabulary", None)
    if tokens is not None:
        return xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, **options)
    tokenizer = getattr(pair.tokenizer, "inner", pair.tokenizer)
    return xgrammar.TokenizerInfo.from_huggingface(tokenizer, **options)
