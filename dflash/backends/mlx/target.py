"""The MLX target behind the seam: a model of mlx-lm over caches that can be rolled back.

Bookkeeping, in tokens: ``_tokens`` is everything committed, its last entry is the anchor. The
caches hold a beginning of what is before it; where a recurrent state had to be put back that is
less than all, and the rest runs again in front of the next block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from dflash.backends.mlx.cache import Caches, State
from dflash.backends.mlx.lm import tapped
from dflash.backends.mlx.sampling import Ids, compute, rule, rule_by
from dflash.core.types import Proposal, Request, Verdict

CHUNK = 512  # prompt rows per forward: bounds feature and activation memory
REPLAY = 16  # tokens that may wait to run again beside a block; more get a forward of their own
KEPT = 3  # recurrent states of earlier places that a later request may resume at
CLEAR = 256  # tokens between two releases of MLX's buffer cache


class MlxTargetSession:
    """State of one mlx-lm model over one growing token sequence (batch 1)."""

    def __init__(
        self,
        model: Any,
        taps: Sequence[int],
        *,
        chunk: int = CHUNK,
        sampler: Callable[[Any], Any] | None = None,
    ) -> None:
        """``taps`` are output-of-layer ids; ``sampler`` chooses in the request's place.

        Raises CheckpointError for state that cannot go back.
        """
        self._model, self._taps, self._chunk = model, tuple(taps), chunk
        self._sampler = sampler
        self._caches = Caches(model)
        self._tokens: list[int] = []
        self._request = Request((), 0)
        self._verdict: Verdict[Any] | None = None
        self._states: dict[int, State] = {}  # length to the recurrent states there
        self._ends = 0  # committed tokens that have been run, or will be with the next block
        self._cleared = 0

    def holds(self, prompt: Sequence[int], most: int) -> int:
        """Longest common prefix of ``prompt`` and what was run, at which the state can be."""
        limit = min(most, len(prompt), self._ends)
        pairs = zip(prompt[:limit], self._tokens, strict=False)
        common = next((i for i, (one, other) in enumerate(pairs) if one != other), limit)
        if not self._caches.replays:
            return common if common >= self._caches.floor else 0
        places = [length for length in self._states if length <= common]
        return common if common >= self._caches.length else max(places, default=0)

    def prefill(self, request: Request, reuse: int) -> Iterator[Verdict[Any]]:
        """Run the prompt from ``reuse`` on; each verdict has the features of its chunk.

        The last token runs alone, so that no other row meets the head. An abandoned prefill leaves
        the chunks already run in place.
        """
        prompt = list(request.prompt)
        assert 0 <= reuse < len(prompt), "at least the last prompt token is run"
        self._back_to(reuse)
        self._tokens, self._request, self._ends = prompt[:reuse], request, reuse
        for start in range(reuse, len(prompt), self._chunk):
            rows = prompt[start : start + self._chunk]
            if start + len(rows) < len(prompt):
                yield Verdict(tokens=[], rows=len(rows), features=self._take(rows))
                continue
            before = self._take(rows[:-1]) if len(rows) > 1 else None
            logits, features = self._run(rows[-1:])
            self._tokens += rows[-1:]
            self._ends += 1
            ruling = self._rule(logits, (), None, features)
            self._say(ruling.tokens)
            if before is not None:
                features = mx.concatenate([before, features])
            yield Verdict(ruling.tokens, rows=len(rows), features=features, notes=ruling.notes)

    def _take(self, rows: list[int]) -> Any:
        """Run ``rows`` of the prompt and have them computed; their features."""
        _, features = self._run(rows)
        compute(*self._caches.arrays(), features)
        self._tokens += rows
        self._ends += len(rows)
        self._remember()
        return features

    def verify(self, proposal: Proposal[Any]) -> Verdict[Any]:
        """Judge anchor + proposal in one forward; waits once.

        Features are those of the anchor and the accepted drafts: ``[accepted + 1, M*Ht]``.
        """
        assert proposal.parents is None, "this target verifies chains"
        owed = self._tokens[self._caches.length : self._ends]
        if len(owed) > REPLAY:
            self._ends -= len(owed)
            self._run(owed)
            self._ends += len(owed)
        self._remember()
        anchor, drafted = self._tokens[-1:], proposal.tokens
        rows: Ids = [*anchor]
        if isinstance(drafted, mx.array):
            drafted = drafted.astype(mx.int32)
            rows = mx.concatenate([mx.array(anchor, dtype=mx.int32), drafted])
        else:
            rows += drafted
        logits, features = self._run(rows)
        ruling = self._rule(logits, drafted, proposal.q, features)
        kept = ruling.accepted + 1
        self._verdict = Verdict(
            tokens=ruling.tokens,
            path=range(ruling.accepted),
            drafted=proposal.rows,
            rows=kept,
            features=None if features is None else features[:kept],
            notes=ruling.notes,
        )
        return self._verdict

    def commit(self, kept: int) -> None:
        """Keep the first ``kept`` tokens of the last verdict, ``1 <= kept <= accepted + 1``."""
        assert self._verdict is not None, "commit follows verify"
        assert 1 <= kept <= len(self._verdict.tokens), f"kept {kept} is not in the verdict"
        self._say(self._verdict.tokens[:kept])
        self._verdict = None
        self._ends = len(self._tokens) - 1
        self._back_to(self._ends)
        if len(self._tokens) - self._cleared >= CLEAR:
            self._cleared = len(self._tokens)
            mx.clear_cache()

    def fork(self) -> MlxTargetSession:
        """An independent session with the same tokens and caches of its own."""
        twin = object.__new__(MlxTargetSession)
        twin.__dict__.update(self.__dict__)
        twin._caches, twin._tokens = self._caches.copy(), list(self._tokens)
        twin._states = dict(self._states)
        return twin

    def grow(self, capacity: int) -> None:
        """Nothing to do: caches make room as they fill."""

    def close(self) -> None:
        """Free the caches; idempotent."""
        self._caches = Caches(self._model, [])
        self._tokens, self._states, self._verdict = [], {}, None

    def bytes(self) -> int:
        """Bytes of keys, values and states held now."""
        return self._caches.bytes()

    def _run(self, rows: Ids) -> tuple[Any, Any]:
        """``rows`` after everything before them: their logits and features.

        What is committed and not in the caches runs in front, and nobody sees its rows.
        """
        owed = self._tokens[self._caches.length : self._ends]
        before = len(owed)
        ids = rows if isinstance(rows, mx.array) else mx.array(list(rows), dtype=mx.int32)
        if before:
            ids = mx.concatenate([mx.array(owed, dtype=mx.int32), ids])
        with tapped(self._model, self._taps) as taps:
            logits = self._model(ids[None], cache=self._caches.layers)
        self._caches.length += before + len(rows)
        states = [tap.rows(before) for tap in taps]
        features = mx.concatenate(states, axis=-1) if states else None
        return logits[0, before:], features

    def _rule(self, logits: Any, drafted: Ids, q: Any, features: Any) -> Any:
        output = self._tokens[len(self._request.prompt) :]
        beside = [a for a in (*self._caches.arrays(), features) if a is not None]
        if self._sampler is not None:
            return rule_by(self._sampler, logits, drafted, beside=beside)
        return rule(logits, self._request, output, drafted, q, beside=beside)

    def _say(self, tokens: list[int]) -> None:
        """Take in committed tokens."""
        self._tokens += tokens
        if self._request.grammar is not None:
            self._request.grammar.commit(tokens)

    def _remember(self) -> None:
        """Keep the recurrent states of this place."""
        if self._caches.replays:
            self._states[self._caches.length] = self._caches.snapshot()
            for length in sorted(self._states)[:-KEPT]:
                del self._states[length]

    def _back_to(self, length: int) -> None:
        """The caches to ``length``, or to a place before it from which the rest runs again."""
        if not self._caches.replays:
            self._caches.trim(min(length, self._caches.length))
            return
        if self._caches.length > length:
            place = max((kept for kept in self._states if kept <= length), default=None)
            if place is None:
                self._caches = Caches(self._model)
            else:
                self._caches.restore(place, self._states[place])
        self._states = {k: v for k, v in self._states.items() if k <= length}
