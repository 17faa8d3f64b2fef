"""What a DFlash2 draft has beyond the v1 stack, in MLX: convolutions, and a selector of candidates.

Equations: docs/concepts/dflash2.md. Names are those of published `DFlash2DraftModel` checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from dflash.backends.mlx.dflash import CosSin, DFlashModule, KeyValue, Layer, Rotary
from dflash.backends.mlx.dflash_session import DFlashSession
from dflash.backends.mlx.kinds import DraftKind
from dflash.backends.mlx.sampling import Ids, drawn
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

    def __call__(
        self, h: Any, rotary: Rotary, angles: CosSin, context: KeyValue | None, mask: Any
    ) -> Any:
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

        hidden [1, H] and logits [1, V] are one row's. Candidates are tokens the codebooks have.
        """
        known = logits[:, : self.successor_codebook.shape[0]]
        ids = mx.argpartition(-known, self._top_k - 1, axis=-1)[:, : self._top_k]
        last = self.predecessor_codebook.shape[0] - 1
        left = self.predecessor_codebook[mx.minimum(before, last)] * self.hidden_projection(hidden)
        gained = (left[:, None] @ self.successor_codebook[ids].swapaxes(-1, -2))[:, 0]
        scores = mx.take_along_axis(known, ids, axis=-1).astype(mx.float32)
        row = mx.full(logits.shape, -mx.inf, dtype=mx.float32)
        return mx.put_along_axis(row, ids, scores + gained.astype(mx.float32), axis=-1)


class DFlash2Module(DFlashModule):
    """Parameters as published DFlash2 checkpoints name them; NaN until loaded."""

    make_layer = ConvLayer

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__(spec)
        self.candidate_selector = CandidateSelector(spec)


class DFlash2Session(DFlashSession):
    """State of one DFlash2 draft: v1's bookkeeping, and tokens chosen one after the other."""

    def _draw(self, hidden: Any, output: Sequence[int]) -> tuple[Ids, Any]:
        """Each row's token among its candidates, scored after the token before it.

        Never waits. Options that change logits are the target's alone here: what it may not say is
        drafted in vain.
        """
        logits, before = self._logits(hidden), mx.array(self._tokens[-1:], dtype=mx.int32)
        sampling, found, kept = self._request.sampling, [], []
        for place in range(hidden.shape[0]):
            one = slice(place, place + 1)
            row = self._model.candidate_selector(hidden[one], logits[one], before)
            before, q = drawn(row, sampling, len(output), place)
            found.append(before)
            kept.append(q)
        return mx.concatenate(found), None if kept[0] is None else mx.concatenate(kept)


DFLASH2 = DraftKind(DFlash2Module, DFlash2Session)
