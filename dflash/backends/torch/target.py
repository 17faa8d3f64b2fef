"""The torch target behind the seam: a causal LM of transformers over a preallocated cache.

Bookkeeping, in tokens: ``_tokens`` is everything committed, its last entry is the anchor, and the
cache holds exactly the tokens before it. A forward may write past that; ``commit`` and ``prefill``
take the cache back (`rollback.Rewind`), which costs nothing where it is a change of length. The
state between two calls of the loop is always one that ``holds`` can offer to the next request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from dflash.backends.torch.cache import ROOM, PreallocatedCache, make_cache
from dflash.backends.torch.features import Taps
from dflash.backends.torch.graph_target import GraphForward, make_forward
from dflash.backends.torch.graphs import Graphs
from dflash.backends.torch.judge import Judge, make_judge
from dflash.backends.torch.memory import guard
from dflash.backends.torch.phases import mark, spans
from dflash.backends.torch.rollback import Rewind
from dflash.backends.torch.sampling import settle
from dflash.backends.torch.tree import Branches, make_branches
from dflash.backends.torch.upload import upload
from dflash.core.types import Proposal, Request, Verdict

CHUNK = 512  # prompt rows per forward: bounds feature and activation memory


class TorchTargetSession:
    """State of one transformers causal LM over one growing token sequence (batch 1)."""

    def __init__(
        self,
        model: Any,
        taps: Sequence[int],
        capacity: int,
        *,
        chunk: int = CHUNK,
        graphs: Graphs | None = None,
    ) -> None:
        """``capacity`` is the most cache rows ever written; ``taps`` output-of-layer ids.
        ``graphs`` replay the passes of a few rows, where they can be.

        Raises PairError for a tap outside the model, CheckpointError for a model whose state
        cannot be rolled back.
        """
        self._model = model
        self._taps = Taps(model, taps)
        self._chunk = chunk
        self._cache: PreallocatedCache = make_cache(model.config, capacity)
        self._rewind = Rewind(model, self._cache)
        self._graphs = graphs
        self._forward = make_forward(model, graphs)
        self._tokens: list[int] = []
        self._request = Request((), 0)
        self._judge: Judge = make_judge(self._request)
        self._verdict: Verdict[Tensor] | None = None

    def holds(self, prompt: Sequence[int], most: int) -> int:
        """Longest common prefix of ``prompt`` and the cached tokens, at most ``most``.

        With recurrent layers: the longest that a state is there for.
        """
        limit = min(most, len(prompt), self._cache.length)
        common = next((i for i in range(limit) if prompt[i] != self._tokens[i]), limit)
        return self._rewind.reach(common)

    def prefill(self, request: Request, reuse: int) -> Iterator[Verdict[Tensor]]:
        """Run the prompt from ``reuse`` on; each verdict has the features of its chunk.

        An abandoned prefill leaves the chunks already run in place. Where no state is kept for
        ``reuse``, rows before it run again and are not in any verdict.
        """
        prompt = list(request.prompt)
        assert 0 <= reuse < len(prompt), "at least the last prompt token is run"
        held = self._rewind.to(reuse)
        self._tokens = prompt[:held]
        self._request, self._judge = request, make_judge(request)
        for rows in self._chunks(prompt, held, reuse):
            logits, features = self._run(rows, keep=1)
            self._tokens += rows
            if len(self._tokens) <= reuse:
                continue
            if len(self._tokens) < len(prompt):
                yield Verdict(tokens=[], rows=len(rows), features=features)
                continue
            with torch.inference_mode():
                ruling = settle(self._judge(logits, self._tokens), ())
            self._say(ruling.tokens)
            yield Verdict(ruling.tokens, rows=len(rows), features=features, notes=ruling.notes)

    def _chunks(self, prompt: list[int], start: int, reuse: int) -> Iterator[list[int]]:
        """The rows of each pass. Recurrent states are remembered before the last token: there the
        same prompt resumes, and a chat whose template writes the answer anew."""
        last = len(prompt) - 1
        ends = {reuse, len(prompt), *([last] if self._rewind.recurrent else ())}
        for end in sorted(end for end in ends if end > start):
            while start < end:
                yield prompt[start : min(end, start + self._chunk)]
                start = min(end, start + self._chunk)
            if end == last:
                self._rewind.remember()

    def verify(self, proposal: Proposal[Tensor]) -> Verdict[Tensor]:
        """Judge anchor + proposal in one forward; waits for the device once.

        Features are those of the anchor and the accepted drafts: ``[accepted + 1, M*Ht]``.
        """
        start, tree = mark(self._forward.device), None
        drafted, parents = proposal.tokens, proposal.parents
        rows: Tensor | list[int] = [self._tokens[-1]]
        if isinstance(drafted, Tensor):
            rows = torch.cat([upload(rows, self._forward.device), drafted.to(torch.long)])
        else:
            rows = [*rows, *drafted]
        if parents is not None:
            tree = make_branches(parents, proposal.depth, self._forward.device)
        with self._rewind.record() if proposal.rows else nullcontext():
            logits, features = self._run(rows, keep=0, tree=tree)
        with torch.inference_mode():
            decision = self._judge(logits, self._tokens, drafted, proposal.q, tree)
            end = mark(self._forward.device)
            ruling = settle(decision, drafted, parents)
            if tree is not None:
                features = self._keep_path(ruling.path, features)
        rows_kept = ruling.accepted + 1
        self._verdict = Verdict(
            tokens=ruling.tokens,
            path=ruling.path,
            drafted=proposal.rows,
            rows=rows_kept,
            features=None if features is None else features[:rows_kept],
            notes=ruling.notes,
            ns=spans(proposal.meta, proposal.rows, start, end),
        )
        return self._verdict

    def commit(self, kept: int) -> None:
        """Keep the first ``kept`` tokens of the last verdict, ``1 <= kept <= accepted + 1``."""
        assert self._verdict is not None, "commit follows verify"
        assert 1 <= kept <= len(self._verdict.tokens), f"kept {kept} is not in the verdict"
        self._say(self._verdict.tokens[:kept])
        self._verdict = None
        reached = self._rewind.to(len(self._tokens) - 1)
        assert reached == len(self._tokens) - 1, "a verified block can be cut at any row"

    def fork(self) -> TorchTargetSession:
        """An independent session with the same tokens and a copy of the cache.

        Raises OutOfMemory.
        """
        twin = TorchTargetSession(
            self._model, self._taps.layers, 0, chunk=self._chunk, graphs=self._graphs
        )
        with guard("copying a session"):
            twin._cache = self._cache.copy()
        twin._rewind = self._rewind.fork(twin._cache)
        twin._tokens, twin._request = list(self._tokens), self._request
        twin._judge = make_judge(self._request)
        return twin

    def grow(self, capacity: int) -> None:
        """Room for ``capacity`` tokens and one block. Raises OutOfMemory."""
        with guard(f"making room for {capacity} tokens"):
            self._cache.grow(capacity + ROOM)

    def close(self) -> None:
        """Free the cache; idempotent."""
        if isinstance(self._forward, GraphForward):
            self._forward.close()
        self._cache = make_cache(self._model.config, 0)
        self._rewind = Rewind(self._model, self._cache)
        self._tokens, self._verdict = [], None

    def bytes(self) -> int:
        """Bytes of keys, values and recurrent states allocated now."""
        return self._cache.bytes() + self._rewind.bytes()

    def _say(self, tokens: list[int]) -> None:
        """Take in committed tokens."""
        self._tokens += tokens
        if self._request.grammar is not None:
            self._request.grammar.commit(tokens)

    def _keep_path(self, path: Sequence[int], features: Tensor | None) -> Tensor | None:
        """Anchor and path are all that stays of a tree, in the cache and in the features."""
        rows = [0, *(node + 1 for node in path)]
        self._cache.gather(len(self._tokens) - 1, rows)
        return None if features is None else features[upload(rows, features.device)]

    def _run(
        self, rows: Sequence[int] | Tensor, keep: int, tree: Branches | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """One forward after the cached tokens: logits ``[n, V]`` and features ``[n, M*Ht]``."""
        with torch.inference_mode(), guard("running the target"):
            logits = self._forward(rows, self._cache, keep, self._taps, tree)
            return logits, self._taps.take()
