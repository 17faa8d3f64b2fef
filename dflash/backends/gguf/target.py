"""The llama.cpp target behind the seam: one context, rolled back by position.

Bookkeeping, in tokens: ``_tokens`` is everything committed, its last entry is the anchor, and the
cache holds exactly the tokens before it. A memory that cannot forget single tokens (recurrent
layers) is emptied and fed again, which is slow and right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from math import isfinite

from dflash.backends.gguf.native import Array, Context
from dflash.backends.gguf.taps import Taps
from dflash.core.host import Ruling, rule
from dflash.core.logits import changes_logits
from dflash.core.types import Proposal, Request, Verdict
from dflash.errors import WeightsError

Open = Callable[[int], tuple[Context, Taps]]
NOT_FINITE = (
    "the target computed logits that are not finite: its weights are damaged, or a number format "
    "is too narrow for it (try type_k and type_v f16)"
)


class GgufTarget:
    """TargetSession over one context of a GGUF model."""

    def __init__(self, opened: Open, capacity: int) -> None:
        """``opened`` makes a context for that many tokens with its taps: here, for every fork, and
        when there is to be more room."""
        self._opened, self._capacity = opened, capacity
        self._context, self._taps = opened(capacity)
        self._tokens: list[int] = []
        self._cached = 0  # rows in the cache
        self._request, self._bare = Request((), 0), False  # bare: an argmax and nothing else
        self._verdict: Verdict[Array] | None = None

    def holds(self, prompt: Sequence[int], most: int) -> int:
        """Longest common prefix of ``prompt`` and the cached tokens, at most ``most``.

        A recurrent memory resumes where it stands or not at all.
        """
        limit = min(most, len(prompt), self._cached)
        pairs = zip(prompt[:limit], self._tokens[:limit], strict=True)
        held = next((i for i, (one, other) in enumerate(pairs) if one != other), limit)
        return held if not self._context.model.recurrent or held == self._cached else 0

    def prefill(self, request: Request, reuse: int) -> Iterator[Verdict[Array]]:
        """As the protocol says, a chunk of ``n_batch`` tokens a verdict."""
        prompt = list(request.prompt)
        assert 0 <= reuse < len(prompt), "at least the last prompt token is run"
        self._rewind(reuse)
        self._tokens, self._request = prompt[:reuse], request
        sampling = request.sampling
        self._bare = sampling.temperature == 0 and sampling.logprobs is None
        self._bare = self._bare and not changes_logits(request)
        for start in range(reuse, len(prompt), self._context.most):
            rows = prompt[start : start + self._context.most]
            last = start + len(rows) == len(prompt)
            self._run(rows, outputs=int(last))
            features = self._taps.rows(len(rows))
            self._tokens += rows
            if not last:
                yield Verdict([], rows=len(rows), features=features)
                continue
            ruling = self._judge(1)
            self._say(ruling.tokens)
            yield Verdict(ruling.tokens, rows=len(rows), features=features, notes=ruling.notes)

    def verify(self, proposal: Proposal[Array]) -> Verdict[Array]:
        """Judge anchor and drafts in one pass; features are those of the rows that stay."""
        assert proposal.parents is None, "this target verifies chains"
        began = time.perf_counter_ns()
        drafted = (
            [int(token) for token in proposal.tokens[: proposal.rows]] if proposal.rows else []
        )
        self._run([self._tokens[-1], *drafted], outputs=len(drafted) + 1)
        ruling = self._judge(len(drafted) + 1, drafted, proposal.q)
        draft_ns = 0 if not drafted else proposal.meta if isinstance(proposal.meta, int) else -1
        self._verdict = Verdict(
            ruling.tokens,
            ruling.path,
            len(drafted),
            ruling.accepted + 1,
            self._taps.rows(ruling.accepted + 1),
            ruling.notes,
            (draft_ns, time.perf_counter_ns() - began),
        )
        return self._verdict

    def commit(self, kept: int) -> None:
        """Keep the first ``kept`` tokens of the last verdict, ``1 <= kept <= accepted + 1``."""
        assert self._verdict is not None, "commit follows verify"
        assert 1 <= kept <= len(self._verdict.tokens), f"kept {kept} is not in the verdict"
        self._say(self._verdict.tokens[:kept])
        self._verdict = None
        if self._cached != len(self._tokens) - 1:
            self._rewind(len(self._tokens) - 1)

    def fork(self) -> GgufTarget:
        """An independent session with a copy of the cache."""
        twin = GgufTarget(self._opened, self._capacity)
        if self._cached:
            twin._context.restore(self._context.save())
        twin._tokens, twin._cached = list(self._tokens), self._cached
        twin._request, twin._bare = self._request, self._bare
        return twin

    def grow(self, capacity: int) -> None:
        """Room for ``capacity`` tokens, in a larger context. Raises OutOfMemory."""
        before, (context, taps) = self._context, self._opened(capacity)
        if self._cached:
            context.restore(before.save())
        self._context, self._taps, self._capacity = context, taps, capacity
        before.close()

    def close(self) -> None:
        """Free the context; idempotent."""
        self._context.close()
        self._tokens, self._cached, self._verdict = [], 0, None

    def _say(self, tokens: list[int]) -> None:
        """Take in committed tokens."""
        self._tokens += tokens
        if self._request.grammar is not None:
            self._request.grammar.commit(tokens)

    def _judge(self, rows: int, drafted: Sequence[int] = (), q: Array | None = None) -> Ruling:
        logits = self._context.logits(rows)
        if rows == 1 and self._bare:  # `rule` without what a plain step does not need
            token = int(logits.argmax())
            if isfinite(logits.item(token)):
                return Ruling([token], 0)
            raise WeightsError(NOT_FINITE)
        output = self._tokens[len(self._request.prompt) :]
        ruling = rule(logits, self._request, output, drafted, q)
        said = zip(logits, ruling.tokens, strict=False)
        if not all(isfinite(row.item(token)) for row, token in said):
            raise WeightsError(NOT_FINITE)
        return ruling

    def _run(self, rows: Sequence[int], outputs: int) -> None:
        self._context.run(rows, self._cached, outputs)
        self._cached += len(rows)

    def _rewind(self, length: int) -> None:
        """The cache ends before position ``length``."""
        if self._cached == length:
            return
        assert length < self._cached, "a cache only forgets"
        if length and self._context.rollback(length):
            self._cached = length
            return
        self._context.clear()
        self._cached = 0
        for start in range(0, length, self._context.most):
            self._run(self._tokens[start : min(length, start + self._context.most)], outputs=0)
