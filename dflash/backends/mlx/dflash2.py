"""What a DFlash2 draft has beyond the v1 stack, in MLX: convolutions, and a selector of candidates.

Equations: docs/concepts/dflash2.md. Names are those of published `DFlash2DraftModel` checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from dflash.backends.mlx.dflash import Context, CosSin, DFlashModule, Layer, Rotary
from dflash.backends.mlx.dflash_session import DFlashSession
from dflash.backends.mlx.kinds import DraftKind
from dflash.backends.mlx.propose import Drawn, confidence, drawn, joined
from dflash.drafts.methods import DFlash2
from dflash.drafts.spec import DraftSpec

SIDES = 2  # before and behind a sublayer


class GroupedConv(nn.Module):
    """Causal convolution over a block's rows, its coefficients made anew from each row."""

    def __init__(self, width: int, sizes: DFlash2) -> None:
        super().__init__()
        taps, groups = sizes.conv_kernel_size, width // sizes.conv_group_size
        self._shape = (SIDES, taps, groups)
        self.base_kernel = mx.zeros((SIDES, taps, width))
        self.kernel_projection = nn.Linear(width, SIDES * taps * groups, bias=False)

    def __call__(self, x: Any) -> tuple[Any, Callable[[Any], Any]]:
        """``x`` [1, R, H] convolved as a sublayer's input, and the convolution of its output.

        Both sides' coefficients are x's. The rows are one block.
        """
        delta = self.kernel_projection(x[0]).reshape(-1, *self._shape)  # [R, side, tap, g]
        return self._convolve(x, delta[:, 0], 0), lambda y: self._convolve(y, delta[:, 1], 1)

    def _convolve(self, y: Any, delta: Any, side: int) -> Any:
        count, taps, groups = delta.shape
        rows = y[0].reshape(count, groups, -1)
        base = self.base_kernel[side].reshape(taps, groups, -1)
        out = rows * (base[0] + delta[:, 0, :, None])
        for tap in range(1, min(taps, count)):
            late = rows[:-tap] * (base[tap] + delta[tap:, tap, :, None])
            out = out + mx.concatenate([mx.zeros((tap, *late.shape[1:]), late.dtype), late])
        return out.reshape(y.shape)


class ConvLayer(Layer):
    """A DFlash layer with a convolution before and behind each sublayer."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__(spec)
        assert spec.dflash2 is not None, "the spec of another kind of draft"
        self.attention_conv = GroupedConv(spec.hidden_size, spec.dflash2)
        self.mlp_conv = GroupedConv(spec.hidden_size, spec.dflash2)

    def __call__(self, h: Any, rotary: Rotary, angles: CosSin, context: Context, mask: Any) -> Any:
        """Block rows [1, R, H] through one layer; context rows are never convolved."""
        x, behind = self.attention_conv(self.input_layernorm(h))
        h = h + behind(self.self_attn(x, rotary, angles, context, mask))
        x, behind = self.mlp_conv(self.post_attention_layernorm(h))
        return h + behind(self.mlp(x))


class CandidateSelector(nn.Module):
    """How well each candidate of a row follows a given token there."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        assert spec.dflash2 is not None, "the spec of another kind of draft"
        rank = spec.dflash2.selector_rank
        self._top_k = spec.dflash2.selector_top_k
        self.hidden_projection = nn.Linear(spec.hidden_size, rank, bias=False)
        self.predecessor_codebook = mx.zeros((spec.vocab_size, rank))
        self.successor_codebook = mx.zeros((spec.vocab_size, rank))

    def __call__(self, hidden: Any, logits: Any, before: Any) -> Any:
        """``[1, V]``: the candidates' scores after token ``before`` [1]; -inf elsewhere.

        hidden [1, H] and logits [1, V] are one row's.
        """
        ids, scores = self._candidates(logits)
        scores = scores + self._transitions(hidden, before[None], ids)[:, 0]
        row = mx.full(logits.shape, -mx.inf, dtype=mx.float32)
        return mx.put_along_axis(row, ids, scores, axis=-1)

    def best_path(self, hidden: Any, logits: Any, anchor: Any) -> Any:
        """``[n]``: the tokens whose scores, each a distribution, multiply to the most (Viterbi).

        hidden [n, H] and logits [n, V] are a block's; ``anchor`` [1] is the token before it. Scores
        are normalised row by row: logits of different rows have no common zero.
        """
        ids, scores = self._candidates(logits)
        first = self._transitions(hidden[:1], anchor[None], ids[:1])[0, 0]
        total, back = _normed(scores[0] + first), []
        for place in range(1, len(ids)):
            one, before = slice(place, place + 1), slice(place - 1, place)
            gained = self._transitions(hidden[one], ids[before], ids[one])[0]
            edges = _normed(scores[one] + gained)
            whole = total[:, None] + edges
            back.append(mx.argmax(whole, axis=0))
            total = whole.max(axis=0)
        places = [mx.argmax(total)]
        for arrows in reversed(back):
            places.append(arrows[places[-1]])
        return mx.take_along_axis(ids, mx.stack(places[::-1])[:, None], axis=-1)[:, 0]

    @property
    def choices(self) -> int:
        """Candidates of a row."""
        return self._top_k

    def _candidates(self, logits: Any) -> tuple[Any, Any]:
        """Ids and float32 logits [n, k] of the best tokens that the codebooks have."""
        known = logits[:, : self.successor_codebook.shape[0]]
        ids = mx.argpartition(-known, self._top_k - 1, axis=-1)[:, : self._top_k]
        return ids, mx.take_along_axis(known, ids, axis=-1).astype(mx.float32)

    def _transitions(self, hidden: Any, before: Any, ids: Any) -> Any:
        """``[n, m, k]``: what candidates ids [n, k] gain after tokens before [n, m]."""
        last = self.predecessor_codebook.shape[0] - 1
        left = self.predecessor_codebook[mx.minimum(before, last)]
        left = left * self.hidden_projection(hidden)[:, None]
        return (left @ self.successor_codebook[ids].swapaxes(-1, -2)).astype(mx.float32)


def _normed(scores: Any) -> Any:
    return scores - mx.logsumexp(scores, axis=-1, keepdims=True)


class DFlash2Module(DFlashModule):
    """Parameters as published DFlash2 checkpoints name them; NaN until loaded."""

    make_layer = ConvLayer

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__(spec)
        self.candidate_selector = CandidateSelector(spec)


class DFlash2Session(DFlashSession):
    """State of one DFlash2 draft: v1's bookkeeping, and tokens chosen one after the other."""

    def _draw(self, hidden: Any, output: Sequence[int]) -> Drawn:
        """Each row's token among its candidates, scored after the token before it.

        Never waits. Options that change logits are the target's alone here: what it may not say is
        drafted in vain.
        """
        logits, before = self._logits(hidden), mx.array(self._tokens[-1:], dtype=mx.int32)
        sampling, selector = self._request.sampling, self._model.candidate_selector
        if sampling.draft_path == "best":
            return Drawn(selector.best_path(hidden, logits, before).astype(mx.int32))
        parts = []
        for place in range(hidden.shape[0]):
            one = slice(place, place + 1)
            row = selector(hidden[one], logits[one], before)
            found = drawn(row, sampling, len(output), place)
            before = found.tokens
            sure = confidence(row, selector.choices) if sampling.draft_p_min else None
            parts.append(found._replace(sure=sure))
        return joined(parts)


DFLASH2 = DraftKind(DFlash2Module, DFlash2Session)
