"""The options of a request on torch: `dflash.core.logits.process`, for all rows of a block at once.

A `Chain` is made once a request, and only where the request has such options. Penalties, bias and
fixed bans stay on the device. Runs that may not repeat, bad words of several tokens, processors and
grammars need the drafted ids on the host: one more wait a round, never one a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dflash.backends.torch.sampling import Ids, on_host, to_numpy
from dflash.backends.torch.upload import send, upload
from dflash.core.logits import Bans, changes_logits, run_processor
from dflash.core.types import Request


def make_chain(request: Request) -> Chain | None:
    """The chain of ``request``; None where no option changes logits."""
    return Chain(request) if changes_logits(request) else None


class Chain:
    """Options applied to rows of logits, each with the history of its own place.

    It learns committed tokens from the history it is called with, which only ever grows, so one
    chain serves one session.
    """

    def __init__(self, request: Request) -> None:
        """Nothing is allocated before the first call tells device and vocabulary."""
        s = request.sampling
        self._request, self._bans = request, Bans(s)
        self._penalties = s.presence_penalty != 0 or s.frequency_penalty != 0
        words = s.no_repeat_ngram > 0 or any(len(word) > 1 for word in s.bad_words)
        self._bans_vary = words
        self.on_host = words or bool(s.processors) or request.grammar is not None
        """Whether the drafted ids are needed on the host."""
        self.in_order = self.on_host or self._penalties or s.repetition_penalty != 1
        """Whether a row depends on the drafts before it."""
        self._known = 0  # tokens of the history taken in
        self._ready = False

    def __call__(
        self, logits: Tensor, history: Sequence[int], drafted: Ids, first: int = 0
    ) -> Tensor:
        """``[n, V]``: a copy, float32 or wider, -inf where forbidden.

        Row i is the place after ``history`` (prompt and committed tokens) and the first
        ``first + i`` of ``drafted``, which may be missing where `in_order` is False.
        """
        rows = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        self._learn(history, rows)
        if self.in_order:
            rows = self._penalise(rows, drafted, first)
        if self._bias is not None:
            rows += self._bias
        ids = on_host(drafted) if self.on_host else []
        if self._request.sampling.processors:
            rows = self._processed(rows, history, ids, first)
        self._forbid(rows, len(history) - len(self._request.prompt), ids, first)
        return rows

    def _learn(self, history: Sequence[int], rows: Tensor) -> None:
        """Take in what was committed since the last call."""
        if not self._ready:
            self._prepare(rows)
        fresh, start = history[self._known :], len(self._request.prompt)
        if not fresh:
            return
        if self._bans_vary:
            self._bans.add(fresh)
        if self._seen is not None:
            self._seen.index_fill_(0, upload(fresh, rows.device), True)
        made = history[max(start, self._known) :]
        if self._counts is not None and made:
            ids = upload(made, rows.device)
            self._counts.index_add_(0, ids, torch.ones_like(ids, dtype=rows.dtype))
        self._known = len(history)

    def _prepare(self, rows: Tensor) -> None:
        s, size = self._request.sampling, rows.shape[-1]
        self._ready = True
        self._seen = rows.new_zeros(size, dtype=torch.bool) if s.repetition_penalty != 1 else None
        self._counts = rows.new_zeros(size) if self._penalties else None
        self._bias: Tensor | None = None
        if s.logit_bias:
            self._bias = rows.new_zeros(size)
            for token, bias in s.logit_bias:
                self._bias[token] += bias
        single = [word[0] for word in s.bad_words if len(word) == 1]
        self._never = upload(single, rows.device) if single else None
        stops = [token for token in self._request.stop_ids if token < size]
        self._stops = upload(sorted(stops), rows.device)

    def _penalise(self, rows: Tensor, drafted: Ids, first: int) -> Tensor:
        s = self._request.sampling
        if self._seen is None and self._counts is None:
            return rows
        extra = _counts_before(rows, upload(drafted, rows.device), first)
        if self._seen is not None:
            by = rows.new_full((), s.repetition_penalty)
            changed = torch.where(rows > 0, rows / by, rows * by)
            rows = torch.where(self._seen | (extra > 0), changed, rows)
        if self._counts is not None:
            counts = self._counts + extra
            rows = rows - counts * s.frequency_penalty
            rows = rows - (counts > 0).to(rows) * s.presence_penalty
        return rows

    def _processed(
        self, rows: Tensor, history: Sequence[int], ids: Sequence[int], first: int
    ) -> Tensor:
        table = to_numpy(rows)
        for i, row in enumerate(table):
            places = [*history, *ids[: first + i]]
            for processor in self._request.sampling.processors:
                row = run_processor(processor, places, row)
            table[i] = row
        return send(torch.from_numpy(table), rows.device)

    def _forbid(self, rows: Tensor, position: int, ids: Sequence[int], first: int) -> None:
        """Put -inf into ``rows``; ``position`` is the length of the output so far."""
        count = rows.shape[0]
        if self._never is not None:
            rows[:, self._never] = -torch.inf
        if self._bans_vary:
            pairs = [(i, t) for i in range(count) for t in self._bans.after(ids[: first + i])]
            if pairs:
                where = send(torch.tensor(pairs), rows.device)
                rows[where[:, 0], where[:, 1]] = -torch.inf
        early = self._request.sampling.min_tokens - position - first
        if early > 0 and self._stops.numel():
            rows[:early, self._stops] = -torch.inf
        if self._request.grammar is not None:
            masks = [self._request.grammar.allow(ids[: first + i]) for i in range(count)]
            free = np.ones(rows.shape[-1], dtype=bool)
            table = np.stack([free if mask is None else mask for mask in masks])
            rows.masked_fill_(send(torch.from_numpy(~table), rows.device), -torch.inf)


def _counts_before(rows: Tensor, drafted: Tensor, first: int) -> Tensor:
    """``[n, V]``: how often each token is among the first ``first + i`` of ``drafted``."""
    count, drafts = rows.shape[0], drafted.shape[0]
    extra = torch.zeros_like(rows)
    if drafts:
        place = torch.arange(count, device=rows.device)[:, None] + first
        before = torch.arange(drafts, device=rows.device)[None, :] < place
        extra.scatter_add_(1, drafted.to(torch.long).expand(count, -1), before.to(rows))
    return extra
