"""What a DFlash2 draft has beyond the DFlash v1 stack: convolutions, and a selector of candidates.

The stack's rows see each other through attention alone; a short causal convolution around each
attention and each feed-forward lets a row see its neighbour directly. The selector then reads the
rows' likeliest tokens in order and scores each against the token before it. Equations and names are
those of published `DFlash2DraftModel` checkpoints; docs/concepts/dflash2.md has them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.backends.torch.dflash import Context, DFlashDraftModel, Layer
from dflash.backends.torch.rope import CosSin
from dflash.drafts.methods import DFlash2
from dflash.drafts.spec import DraftSpec

SIDES = 2  # before and behind a sublayer


class GroupedConv(nn.Module):
    """Causal convolution over a block's rows, its coefficients made anew from each row.

    A coefficient is a learnt part per channel plus a part that a projection of the row gives to
    each group of channels. Nothing passes a block's border, so a block has no state.
    """

    def __init__(self, width: int, sizes: DFlash2) -> None:
        super().__init__()
        taps, group = sizes.conv_kernel_size, sizes.conv_group_size
        self.shape = (SIDES, taps, width // group)
        self.base_kernel = nn.Parameter(torch.empty(SIDES, taps, width))
        self.kernel_projection = nn.Linear(width, SIDES * taps * (width // group), bias=False)

    def forward(self, x: Tensor, size: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """``x`` convolved as a sublayer's input, and the convolution of that sublayer's output.

        x [B, R, H] are normed rows of blocks of ``size`` rows; both sides' coefficients are x's.
        """
        delta = self.kernel_projection(x).reshape(-1, size, *self.shape)  # [N, size, side, tap, g]
        before = self._convolve(x, delta[:, :, 0], 0)
        return before, lambda y: self._convolve(y, delta[:, :, 1], 1)

    def _convolve(self, y: Tensor, delta: Tensor, side: int) -> Tensor:
        """[B, R, H]: each row and the rows before it in its block, weighed by channel."""
        blocks, size, taps, groups = delta.shape
        rows = y.reshape(blocks, size, groups, -1)  # [N, size, g, c]
        base = self.base_kernel[side].reshape(taps, groups, -1)
        out = rows * (base[0] + delta[:, :, 0, :, None])
        for tap in range(1, min(taps, size)):
            late = rows[:, :-tap] * (base[tap] + delta[:, tap:, tap, :, None])
            out = out + F.pad(late, (0, 0, 0, 0, tap, 0))
        return out.reshape(y.shape)


class ConvLayer(Layer):
    """A DFlash layer with a convolution before and behind each sublayer."""

    def __init__(self, spec: DraftSpec, kind: str) -> None:
        super().__init__(spec, kind)
        assert spec.dflash2 is not None, "the spec of another kind of draft"
        self.attention_conv = GroupedConv(spec.hidden_size, spec.dflash2)
        self.mlp_conv = GroupedConv(spec.hidden_size, spec.dflash2)

    def forward(
        self, h: Tensor, rope: CosSin, context: Context, mask: Tensor | None, size: int
    ) -> Tensor:
        """Block rows [B, R, H] through one layer; context rows are never convolved."""
        x, behind = self.attention_conv(self.input_layernorm(h), size)
        h = h + behind(self.self_attn(x, rope, context, mask))
        x, behind = self.mlp_conv(self.post_attention_layernorm(h), size)
        out: Tensor = h + behind(self.mlp(x))
        return out


class CandidateSelector(nn.Module):
    """How well each candidate of a row follows a given token there."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        assert spec.dflash2 is not None, "the spec of another kind of draft"
        rank = spec.dflash2.selector_rank
        self.top_k = spec.dflash2.selector_top_k
        self.hidden_projection = nn.Linear(spec.hidden_size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.empty(spec.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(spec.vocab_size, rank))
        self._host: tuple[CandidateSelector, ...] = ()  # in a tuple: it is no part of the module

    def on_host(self) -> CandidateSelector:
        """This selector in the host's memory; copied at most once."""
        if self.successor_codebook.device.type == "cpu":
            return self
        if not self._host:
            self._host = (deepcopy(self).to("cpu"),)
        return self._host[0]

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[.., V] to the likeliest ``(ids, logits)`` [.., k], which tokens the codebooks have."""
        known = logits[..., : self.successor_codebook.shape[0]]
        best = known.topk(self.top_k, dim=-1)
        return best.indices, best.values

    def transitions(
        self,
        hidden: Tensor,  # [n, H] final states of the rows
        before: Tensor,  # [n, a] tokens that may stand before each
        ids: Tensor,  # [n, k] candidates
    ) -> Tensor:  # [n, a, k] float32
        """What a candidate's logit gains by the token before it."""
        last = self.predecessor_codebook.shape[0] - 1  # padding of a target's head has no row
        left = self.predecessors(before.clamp(max=last)) * self.hidden_projection(hidden)[:, None]
        gained: Tensor = left @ self.successors(ids).transpose(-1, -2)
        return gained.float()

    def predecessors(self, ids: Tensor) -> Tensor:
        """[..] to [.., r]."""
        return self.predecessor_codebook[ids]

    def successors(self, ids: Tensor) -> Tensor:
        """[..] to [.., r]."""
        return self.successor_codebook[ids]


class DFlash2DraftModel(DFlashDraftModel):
    """Parameters as published DFlash2 checkpoints name them; NaN until loaded."""

    make_layer = ConvLayer

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__(spec)
        self.candidate_selector = CandidateSelector(spec)
        with torch.no_grad():
            for parameter in self.candidate_selector.parameters():
                parameter.fill_(torch.nan)


def best_path(first: Tensor, edges: Tensor) -> Tensor:
    """``[n]``: places in the candidates of the likeliest whole path (Viterbi).

    first [k] are scores of the first row's candidates, edges [n - 1, k, k] of each later row's
    after each of the row before. Each step's scores are normalised over its candidates: logits of
    different rows have no common zero.
    """
    total = first.log_softmax(dim=-1)
    back = []
    for edge in edges.log_softmax(dim=-1):
        total, arrow = (total[:, None] + edge).max(dim=0)
        back.append(arrow)
    path = [total.argmax(dim=0, keepdim=True)]
    for arrow in reversed(back):
        path.append(arrow[path[-1]])
    return torch.cat(path[::-1])
